"""The stubs of the native modules name what the modules hold, with the same arguments.

The emulator's module stands in for ``_cuda``: both are csrc/cuda_bindings.cpp.
"""

from __future__ import annotations

from pathlib import Path

import kvplane_kernels
import pytest
from emulated_build import emulated_module
from kvplane_kernels import _native

from tests.helpers.native.native_stubs import Stub

STUBS = Path(__file__).parents[2] / "csrc" / "kvplane_kernels"
OF_THE_EMULATOR = {
    "set_seed",
    "num_launches",
    "num_batch_copies",
    "num_copied_bytes",
    "num_early_frees",
    "set_gpu_bytes",
    "set_host_memory_is_mapped",
    "set_shared_bytes_of_block",
    "set_driver_version",
}


def stub_of(name: str) -> Stub:
    return Stub(STUBS / f"{name}.pyi", _native if name == "_native" else emulated_module())


@pytest.mark.parametrize("name", ("_native", "_cuda"))
def test_a_stub_has_the_names_arguments_and_classes_of_its_module(name: str) -> None:
    stub = stub_of(name)
    held = {n for n in vars(stub.module) if not n.startswith("__")}
    assert stub.names() == held - (OF_THE_EMULATOR if name == "_cuda" else set())
    assert len(stub.functions()) >= 6
    stub.check_functions()
    stub.check_classes()


def test_the_package_gives_the_native_module_whole() -> None:
    public = {n for n in vars(_native) if not n.startswith("_")}
    assert public <= set(kvplane_kernels.__all__)
