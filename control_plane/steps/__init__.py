"""A step: its number, receipts and operations, and the one plan that results from them."""
