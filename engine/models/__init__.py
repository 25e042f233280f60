"""Models and their weights, and what transformers lacks of them."""
