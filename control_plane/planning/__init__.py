"""Sessions, steps, plans, receipts and registration. Knows messages, but not gRPC."""
