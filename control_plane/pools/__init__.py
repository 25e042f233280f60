"""A pool: its shards, their reports, and the publications sent to them."""
