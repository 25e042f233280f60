"""Tensor parallel: several processes that compute one model, each with a shard of the pool."""
