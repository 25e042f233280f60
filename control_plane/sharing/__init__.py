"""Sessions that share a pool: waiting admissions, blocked growth, sequences that have to yield."""
