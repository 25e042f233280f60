"""Which sequences compute next, and what becomes of their blocks."""
