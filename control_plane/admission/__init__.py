"""Decides which sequences get device blocks next: a queue of admissions, growth, turns, victims."""
