"""From a step's operations and receipts to one plan. Knows messages, and no gRPC."""
