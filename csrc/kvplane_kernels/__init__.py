"""The native kernels of kvplane: paged KV cache operations on plain addresses, shapes and strides.

Shapes and types are not checked here: ``data_plane.kernels`` is the face to call.
"""

from kvplane_kernels._native import (
    Dtype,
    TensorView,
    copy_blocks,
    cpu_isa,
    cpu_isas,
    gather_blocks,
    paged_attention,
    reshape_and_cache,
    scatter_blocks,
    use_cpu_isa,
)

__all__ = [
    "Dtype",
    "TensorView",
    "copy_blocks",
    "cpu_isa",
    "cpu_isas",
    "gather_blocks",
    "paged_attention",
    "reshape_and_cache",
    "scatter_blocks",
    "use_cpu_isa",
]
