"""Engines that share one pool under the real queue, simulated."""
