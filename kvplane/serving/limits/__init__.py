"""How much a caller may send, and how fast: counted before memory or time is spent on it."""
