"""The data plane as a gRPC server: service, registration, metrics and settings."""
