"""The kernels: one interface, implemented on the CPU and on a GPU."""
