"""A server's logs and metrics, and the endpoint for Prometheus."""
