"""Blocks sent to other data planes, and taken from them (docs/adr/0027-blocks-are-pushed.md)."""
