"""Decides which sequences compute next, and which lose their blocks."""
