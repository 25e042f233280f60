"""Blocks kept in files (docs/adr/0028-a-file-tier-by-its-own-names.md)."""
