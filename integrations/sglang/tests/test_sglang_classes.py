"""The tests of the storage backend over the classes of SGLang itself, in place of stand-ins."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SGLANG = "sglang==0.5.23"
MODULES = ("sglang/srt/mem_cache/", "sglang/srt/utils/", "sglang/srt/environ.py")
FACTORY = """
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageFailureInjector
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

module = "kvplane.integrations.sglang.hicache"
extra = {"backend_name": "kvplane", "module_path": module, "class_name": "KvplaneHiCache"}
extra["kvplane"] = {"weights": "rev-1"}
config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "qwen", extra_config=extra)
backend = StorageBackendFactory.create_backend("dynamic", config, None)
assert type(backend) is HiCacheStorageFailureInjector
assert backend.batch_exists(["a"]) == 0 and backend.batch_get_v1(["a"], None) == [False]
"""


@pytest.mark.nightly
def test_sglang_s_factory_makes_the_backend_and_its_classes_pass_the_tests(tmp_path: Path) -> None:
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", SGLANG]
    subprocess.run(download, cwd=tmp_path, check=True, timeout=200)
    (wheel,) = tmp_path.glob("sglang-*.whl")
    with zipfile.ZipFile(wheel) as archive:  # the package's __init__ needs all that it pins
        wanted = [name for name in archive.namelist() if name.startswith(MODULES)]
        archive.extractall(tmp_path, wanted)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    always = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "1"}
    tests = ("-m", "pytest", "-q", "-n", "0", str(Path(__file__).with_name("test_hicache.py")))
    for command in (("-c", FACTORY), tests):
        environ = os.environ | always | {"PYTHONPATH": path}
        subprocess.run([sys.executable, *command], env=environ, check=True, timeout=200)
