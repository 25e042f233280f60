"""``python -m engine``: its commands."""
