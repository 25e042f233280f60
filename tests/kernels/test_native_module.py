"""The native module is needed, and lets other Python threads run while it works."""

from __future__ import annotations

import subprocess
import sys
import threading

import torch

from data_plane.kernels.arguments import AttentionArguments
from data_plane.kernels.backends.cpu import CpuKernels

_IMPORT_WITHOUT_IT = """
import sys
sys.modules["kvplane_kernels"] = None  # as if it were not installed
import data_plane.kernels.backends.cpu
"""


def test_without_the_native_module_the_cpu_kernels_do_not_import() -> None:
    command = [sys.executable, "-c", _IMPORT_WITHOUT_IT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "ImportError: the native kernels (kvplane_kernels) are missing: "
        "build them with `pip install ./csrc`"
    )


def test_other_threads_run_during_a_kernel() -> None:
    query, pages = torch.randn(2000, 8, 128), torch.randn(125, 2, 1, 16, 128)
    lens = torch.tensor([2000])
    tables, starts = torch.arange(125)[None], torch.tensor([0, 2000])
    thread = threading.Thread(
        target=CpuKernels(1).paged_attention,
        args=(AttentionArguments(query, pages, tables, starts, lens),),
    )
    thread.start()
    turns = 0
    while thread.is_alive():
        thread.join(0.001)
        turns += 1
    assert turns > 10
