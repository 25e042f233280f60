"""Carries out plans: the executor and its commands, layers, transfers and captured steps."""
