"""Messages of Envoy's external processing."""
