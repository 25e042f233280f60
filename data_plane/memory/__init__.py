"""The pools' memory: how much, where it is, and how tensors reach it."""
