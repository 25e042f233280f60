"""Samples tokens from logits, and decodes tokens to text."""
