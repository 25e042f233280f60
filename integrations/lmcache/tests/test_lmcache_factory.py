"""LMCache itself makes the adapter, inside its fault-injecting one, beside the releases it pins."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from scripts.planes import run_planes
from tests.e2e.test_distribution import wheel as wheel  # a fixture

# Without torch, which is this environment's, and without what only devices and other stores need.
LMCACHE = "lmcache==0.5.6"
PINS = (
    *("protobuf==6.33.6", "grpcio==1.78.0", "grpcio-status==1.78.0", "numpy==2.2.6"),
    *("prometheus_client==0.24.1", "opentelemetry-api==1.40.0", "opentelemetry-sdk==1.40.0"),
    *("opentelemetry-exporter-otlp==1.40.0", "opentelemetry-exporter-prometheus==0.61b0"),
    *("aiofile", "aiofiles", "aiohttp", "cachetools", "cryptography", "msgspec", "numba"),
    *("psutil", "py-cpuinfo", "pyyaml", "pyzmq", "sortedcontainers"),
)
PROGRAM = """
import os, select, sys
import google.protobuf, grpc, numpy, torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

assert (google.protobuf.__version__, grpc.__version__) == ("6.33.6", "1.78.0")
assert numpy.__version__ == "2.2.6"

def memory(fill, shape=torch.Size([2, 1, 12, 8]), dtype=torch.bfloat16):
    raw, meta = torch.full((384,), fill, dtype=torch.uint8), MemoryObjMetadata(
        shape, dtype, 0, 384, 1, fmt=MemoryFormat.KV_2LTD, shapes=[shape], dtypes=[dtype])
    return TensorMemoryObj(raw, meta, None)

def result_of(event, query):
    while not (result := query()):
        assert select.select([event], [], [], 30)[0]
        os.eventfd_read(event)
    return result

params = {"weights": "rev-1", "page_bytes": 448, "control_plane": sys.argv[1], "lookup_s": 20.0}
plugin = {"type": "plugin", "module_path": "kvplane.integrations.lmcache.l2_adapter",
          "class_name": "KvplaneL2", "adapter_params": params | {"transfer_s": 20.0}}
config = {"type": "fault_inject", "inner": plugin, "gap_indices": [1]}
config = get_l2_adapter_config_class("fault_inject").from_dict(config)
adapter = create_l2_adapter_from_registry(config)
keys = [ObjectKey(bytes([i]) * 32, "qwen", 0, cache_salt="ann" * (i == 2)) for i in range(4)]
objects = [memory(i + 1) for i in range(3)]
task = adapter.submit_store_task(keys[:3], objects)
stored = result_of(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
assert stored[task].bytes_transferred() == 3 * 384, stored
task, query = adapter.submit_lookup_and_lock_task(keys, {}), adapter.query_lookup_and_lock_result
hits = result_of(adapter.get_lookup_and_lock_event_fd(), lambda: query(task))
assert [hits.test(i) for i in range(4)] == [True, True, True, False]
rooms = [memory(0) for _ in range(4)]
task = adapter.submit_load_task(keys, rooms)
whole = result_of(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
assert [whole.test(i) for i in range(4)] == [True, False, True, False]
assert [room.raw_data.unique().tolist() for room in rooms] == [[1], [2], [3], [0]]
adapter.submit_unlock(keys[:3])
assert adapter.report_status()["bytes_loaded"] == 3 * 384
adapter.close()
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_lmcache_s_factory_makes_an_adapter_that_survives_its_faults(
    wheel: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", LMCACHE], check=True, timeout=300)
    subprocess.run([*install, "--only-binary", ":all:", str(wheel), *PINS], check=True, timeout=400)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    pool = ("--opaque-page-bytes", "448", "--model-id", "lmcache/rev-1")
    sizes = ("--num-device-blocks", "16", "--num-host-blocks", "0")
    with run_planes(tmp_path / "planes", (*pool, *sizes)) as planes:
        subprocess.run(
            [str(python), "-I", "-c", PROGRAM, planes.control.address],
            cwd=tmp_path,
            check=True,
            timeout=120,
        )
