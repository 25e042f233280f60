"""A router over engines: it follows what their pools have cached, and picks by seconds."""
