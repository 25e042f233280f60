"""What a server says of itself: logs, metrics, and their endpoint for Prometheus."""
