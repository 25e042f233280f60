"""The control plane: block tables, allocation, reference counts and the prefix index."""
