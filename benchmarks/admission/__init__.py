"""Engines that share one pool under the real line, simulated."""
