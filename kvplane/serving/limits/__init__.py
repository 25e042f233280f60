"""Limits on callers' requests and their rate, checked before memory or time is spent on them."""
