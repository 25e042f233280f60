"""Blocks kept in files (docs/adr/fleet.md)."""
