"""Blocks kept in files (docs/adr/0028-files-are-loaded-by-plans.md)."""
