"""The data plane as a gRPC server: servicer, registration, metrics and settings."""
