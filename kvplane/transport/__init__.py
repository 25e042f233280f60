"""Connections to the planes: channels, certificates, deadlines and retries, streams, health."""
