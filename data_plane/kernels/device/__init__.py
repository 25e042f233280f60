"""The device that kernels run on: which one, the order of its work, whether it still works."""
