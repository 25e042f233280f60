"""Models and their weights, and the model code that transformers lacks."""
