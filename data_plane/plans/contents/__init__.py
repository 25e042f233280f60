"""What each block holds: whose data, how much of it is written, how often it was found."""
