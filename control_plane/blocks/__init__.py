"""Blocks of one pool: states, references, prefix index, reservations. Ints and bytes only."""
