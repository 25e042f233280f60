"""The stub of the native module names what the module holds, with the same arguments, but for the
operations, whose arguments ``NativeKernels`` passes by name.
"""

from __future__ import annotations

from pathlib import Path

from kvplane_kernels import _native

from tests.helpers.native.native_stubs import Stub

STUB = Stub(Path(__file__).parents[2] / "csrc/kvplane_kernels/_native.pyi", _native)
OPERATIONS = {
    *("Dtype", "TensorView", "PagesView", "ScalesView", "AttentionOptions"),
    *("reshape_and_cache", "paged_attention", "copy_blocks", "swap_blocks"),
    *("gather_blocks", "scatter_blocks", "read_runs", "fused_products"),
}


def test_the_stub_has_the_names_arguments_and_classes_of_its_module() -> None:
    held = {n for n in vars(_native) if not n.startswith("__")}
    assert STUB.names() == held - OPERATIONS
    assert len(STUB.functions()) >= 5
    STUB.check_functions()
    STUB.check_classes()
