"""A plug-in of data planes: blocks sent to others, and taken from them (docs/adr/fleet.md)."""
