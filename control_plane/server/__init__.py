"""The control plane as a gRPC server: servicer, registration, metrics and settings."""
