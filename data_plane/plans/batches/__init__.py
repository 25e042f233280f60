"""Plans as the kernels take them: batches of attention, and block copies and swaps."""
