"""LMCache's second level in a kvplane pool."""
