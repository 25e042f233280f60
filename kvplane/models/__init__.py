"""The layout that a model needs of a pool."""
