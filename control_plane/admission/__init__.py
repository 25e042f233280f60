"""Who gets device blocks next: a line of admissions, blocked growth, turns, and who must yield."""
