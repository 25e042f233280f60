"""The loop: a step from its plan to its tokens."""
