"""Records of blocks' contents: whose data, how much of it is written, how often it was found."""
