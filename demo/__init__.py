"""A demonstration: both planes and a real model, with every answer checked."""
