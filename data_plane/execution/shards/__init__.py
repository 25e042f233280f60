"""The kernels on one shard's pools, as plans call them."""
