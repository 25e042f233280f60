"""A page that shows, live, what the pools hold: read-only, over HTTP, for a browser."""
