"""Clients of the planes."""
