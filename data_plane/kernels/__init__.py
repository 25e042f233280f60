"""The kernels of a shard: one interface, on the CPU or a GPU."""
