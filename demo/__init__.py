"""A demonstration: both planes and a real model, with answers checked against transformers."""
