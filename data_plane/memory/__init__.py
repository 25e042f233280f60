"""The pools' memory: its size, its allocation, and small uploads beside it."""
