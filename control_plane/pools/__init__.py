"""A pool: its shards, how they register, and what it learns from their reports."""
