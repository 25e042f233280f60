"""Identity and permissions of callers."""
