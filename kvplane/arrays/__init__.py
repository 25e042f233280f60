"""Tensors of array libraries, without importing any."""
