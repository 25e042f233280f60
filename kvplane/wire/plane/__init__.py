"""The twin of what the planes say to each other."""
