"""The service of names: block tables, allocation, reference counts and the prefix index."""
