"""The kernels' interface on the CPU and on a GPU, each as calls of a native module."""
