"""Blocks pushed by NIXL, from a process of its own (docs/adr/0027-blocks-are-pushed.md)."""
