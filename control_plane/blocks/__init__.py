"""Blocks of one pool: who holds each, what it caches, what is promised. Ints and bytes only."""
