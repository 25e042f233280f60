"""Plans before the kernels: verified, ordered, applied to the block tables, made into batches."""
