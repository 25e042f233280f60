"""What the planes say to each other."""
