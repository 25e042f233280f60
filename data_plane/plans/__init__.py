"""What a plan must be to run: verified, in order, its tables checked, its batch laid out."""
