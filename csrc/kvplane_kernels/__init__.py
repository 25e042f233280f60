"""The native kernels of kvplane: paged KV cache operations on plain addresses, shapes and strides.

Shapes and types are not checked here: call ``data_plane.kernels.backends.cpu.CpuKernels`` instead.
"""

from importlib import import_module
from importlib.util import find_spec

from kvplane_kernels._native import *  # noqa: F403 - the module whole


def has_cuda_build() -> bool:
    """Return whether the package was built with the CUDA kernels, the module ``_cuda``."""
    return find_spec("kvplane_kernels._cuda") is not None


def cuda_device_count() -> int:
    """Return how many GPUs the CUDA kernels can run on; 0 without their build or a driver."""
    if not has_cuda_build():
        return 0
    count: int = import_module("kvplane_kernels._cuda").device_count()
    return count
