"""What a pool's layout must be for a model."""
