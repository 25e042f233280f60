"""The tree keeps its rules, and each rule finds a fault that is planted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tidy_rules as rules

ROOT = Path(__file__).resolve().parent.parent

Rule = Callable[[Path], list[str]]

# For each rule: files that break it, and the place and words that it must answer with.
PLANTED: list[tuple[Rule, dict[str, str], list[str]]] = [
    (
        rules.files_are_short,
        {"engine/long.py": "\n" * 701, "engine/short.py": "\n" * 700},
        ["engine/long.py:701: 701 lines"],
    ),
    (
        rules.functions_are_short,
        {"kvplane/a.py": "\ndef f():\n" + "    x = 1\n" * 70 + "def g():\n" + "    x = 1\n" * 69},
        ["kvplane/a.py:2: f has 71 lines"],
    ),
    (
        rules.lines_are_short,
        {"csrc/a.cpp": "x" * 100 + "\n" + "x" * 101 + "\n", "kvplane/v1/a_pb2.py": "x" * 200},
        ["csrc/a.cpp:2: 101 characters"],
    ),
    (
        rules.imports_go_one_way,
        {
            "kvplane/a.py": "import control_plane.core\n",
            "control_plane/b.py": "def f():\n    from data_plane import pool\n",
            "control_plane/c.py": "import torch\n",
            "data_plane/d.py": "import torch\nfrom control_plane.sessions.model import Plan\n",
            "engine/e.py": "import data_plane, kvplane\nimport control_plane\n",
            "kvplane/transformers/f.py": "import torch, data_plane\nimport engine.llm\n",
            "kvplane/runtime/g.py": "import control_plane, data_plane\nimport engine.llm\n",
        },
        [
            "kvplane/a.py:1: imports control_plane.core",
            "control_plane/b.py:2: imports data_plane.pool",
            "control_plane/c.py:1: imports torch",
            "data_plane/d.py:2: imports control_plane.sessions.model.Plan",
            "engine/e.py:2: imports control_plane",
            "kvplane/transformers/f.py:1: imports data_plane",
            "kvplane/transformers/f.py:2: imports engine.llm",
            "kvplane/runtime/g.py:2: imports engine.llm",
        ],
    ),
    (
        rules.what_is_installed_in_kvplane_imports_itself_by_relative_names,
        {
            "engine/a.py": "from .b import c\nfrom engine.b import d\n",
            "engine/running/b.py": "def f():\n    import engine\n    from engines import g\n",
            "examples/c.py": "import engine\n",
        },
        ["engine/a.py:2: from engine.b import d", "engine/running/b.py:2: import engine"],
    ),
    (
        rules.integrations_stand_on_public_interfaces,
        {
            "control_plane/server/election/__init__.py": "__all__ = ['Elector']\n",
            "data_plane/blocks_from_outside.py": "__all__ = ['Lane']\n",
            "integrations/etcd/a.py": "from control_plane.server.election import Elector\n"
            "from control_plane.server.config import ControlPlaneSettings\nimport data_plane\n"
            "from control_plane.server.election import file_elector\n"
            "from data_plane.blocks_from_outside import Lane, Executor, _private\n"
            "from kvplane.runtime.embedded import ControlPlaneServer\n"
            "importlib.import_module('data_plane.memory')\n",
            "integrations/router/b.py": "from kvplane.errors import _x\nfrom .c import _y\n",
            "integrations/router/c.py": "import kvplane\nfrom kvplane.clients import d\n",
            "control_plane/d.py": "import integrations.etcd\n",
            "kvplane/e.py": "from kvplane.integrations import etcd\n",
        },
        [
            "kvplane/e.py:1: imports kvplane.integrations.etcd",
            "control_plane/d.py:1: imports integrations.etcd",
            "integrations/etcd/a.py:2: imports control_plane.server.config.ControlPlaneSettings",
            "integrations/etcd/a.py:3: imports data_plane",
            "integrations/etcd/a.py:4: imports control_plane.server.election.file_elector",
            "integrations/etcd/a.py:5: imports data_plane.blocks_from_outside.Executor",
            "integrations/etcd/a.py:5: imports data_plane.blocks_from_outside._private",
            "integrations/etcd/a.py:6: imports kvplane.runtime.embedded.ControlPlaneServer",
            "integrations/etcd/a.py:7: imports data_plane.memory",
            "integrations/router/b.py:1: imports kvplane.errors._x",
            "integrations/router/b.py:2: imports integrations.router.c._y",
        ],
    ),
    (
        rules.only_the_server_of_a_plane_knows_grpc,
        {
            "data_plane/execution/executor.py": "from grpc import aio\n",
            "control_plane/core.py": "import grpc_status\n",
            "data_plane/server/service.py": "import grpc\n",
            "kvplane/clients/control_client.py": "import grpc\n",
        },
        [
            "control_plane/core.py:1: imports grpc_status",
            "data_plane/execution/executor.py:1: imports grpc.aio",
        ],
    ),
    (
        rules.the_block_store_knows_nothing_above_it,
        {
            "csrc/blocks/core/a.cpp": "#include <vector>\n#include <pybind11/pybind11.h>\n",
            "csrc/blocks/core/b.h": '#include "core/a.h"\n#include "eviction/policy.h"\n',
            "csrc/blocks/eviction/c.h": '#include "core/types.h"\n#include "core/b.h"\n',
            "csrc/blocks/bindings/d.cpp": '#include <pybind11/pybind11.h>\n#include "core/b.h"\n',
        },
        [
            "csrc/blocks/core/a.cpp:2: #include <pybind11/pybind11.h>",
            'csrc/blocks/eviction/c.h:2: #include "core/b.h"',
        ],
    ),
    (
        rules.metrics_are_made_in_metrics_files,
        {
            "engine/a.py": "from prometheus_client import Counter\nc = Counter('a', 'b')\n",
            "engine/b.py": "import prometheus_client\nprometheus_client.Gauge('a', 'b')\n",
            "engine/c.py": "from collections import Counter\nc = Counter('a')\n",
            "engine/metrics.py": "from prometheus_client import Counter\nc = Counter('a', 'b')\n",
        },
        ["engine/a.py:2: makes a Counter", "engine/b.py:2: makes a prometheus_client.Gauge"],
    ),
    (
        rules.named_files_exist,
        {
            "README.md": "See `kvplane/gone.py`, kvplane/here.py, here.py and gone.sh.\n",
            "docs/a.md": "[b](adr/b.md) [c](adr/c.md) [r](../README.md) csrc/\nand/or q/k/v\n",
            "docs/adr/b.md": "https://example.org/x/y.md tests/*.py engine/{a,b}.py <x>.json\n",
            "kvplane/here.py": "",
        },
        [
            "README.md:1: names kvplane/gone.py",
            "README.md:1: names gone.sh",
            "docs/a.md:1: names adr/c.md",
            "docs/a.md:1: names csrc/",
            "docs/adr/b.md:1: names tests/*.py",
        ],
    ),
    (
        rules.named_symbols_exist,
        {
            "docs/a.md": "`kvplane/a.py::f` `kvplane/a.py::C.m` `kvplane/a.py::C.g`\n`b.py::f`\n"
            "`csrc/a.h::C.m` `csrc/a.h::f` `csrc/a.h::m` `csrc/a.h::C.n`\n"
            "`csrc/a.cpp::C.m` `csrc/a.cpp::C.n`\n",
            "kvplane/a.py": "def f(): ...\nclass C:\n    def m(self): ...\n",
            "csrc/a.h": "class B;\nclass C final : D {\n  // n(\n  bool m() { return n(1); }\n};\n"
            "inline int f(int a) {\n  return n(a);\n}\n",
            "csrc/a.cpp": "// A C::n(int)\nstd::vector<int> C::m(int a) {\n  C::n(a);\n}\n",
        },
        [
            "docs/a.md:1: names kvplane/a.py::C.g",
            "docs/a.md:2: names b.py::f",
            "docs/a.md:3: names csrc/a.h::m",
            "docs/a.md:3: names csrc/a.h::C.n",
            "docs/a.md:4: names csrc/a.cpp::C.n",
        ],
    ),
    (
        rules.each_invariant_names_its_code_and_its_test,
        {
            "docs/internals.md": "## What always holds\n"
            "| 1 | a | `kvplane/a.py::f` | `tests/unit/test_a.py::test_f` |\n"
            "| 2 | b | `kvplane/a.py::f` | |\n| 3 | c | | `tests/unit/test_a.py::test_f` |\n"
            "## More\n| 4 | d |\n",
        },
        ["invariant 2: names no test", "invariant 3: names no code"],
    ),
    (
        rules.no_module_imports_itself_by_way_of_others,
        {
            "kvplane/a.py": "from .parts import b\n",
            "kvplane/parts/b.py": "if TYPE_CHECKING:\n    from ..c import C\n",
            "kvplane/c.py": "def f():\n    from kvplane import a\n",
            "engine/d.py": "import kvplane.a\n",
        },
        ["circle: kvplane.a -> kvplane.parts.b -> kvplane.c -> kvplane.a"],
    ),
    (
        rules.modules_of_the_core_are_named_by_a_test,
        {
            "control_plane/sessions/a.py": "",
            "control_plane/server/b.py": "",
            "data_plane/execution/executor.py": "",
            "data_plane/plans/c.py": "",
            "data_plane/plans/d.py": "",
            "data_plane/plans/__init__.py": "",
            "engine/e.py": "",
            "tests/helpers/d.py": "import data_plane.plans.d\n",
            "tests/unit/test_a.py": "from control_plane.sessions.a import f\n"
            "from data_plane.plans import c\n",
        },
        [
            "data_plane/execution/executor.py: no test imports it",
            "data_plane/plans/d.py: no test imports it",
        ],
    ),
    (
        rules.folders_form_no_circle,
        {
            "data_plane/kernels/a.py": "from data_plane.memory.deep.b import f\n",
            "data_plane/memory/deep/b.py": "from data_plane.c import f\n",
            "data_plane/memory/d.py": "from data_plane.kernels import a\n",
            "data_plane/c.py": "from data_plane.kernels import a\n",
            "kvplane/runtime/e.py": "from data_plane import c\n",
        },
        ["circle: data_plane/kernels -> data_plane/memory -> data_plane/kernels"],
    ),
    (
        rules.folders_of_the_block_store_form_no_circle,
        {
            "csrc/blocks/core/a.h": '#include "containers/b.h"\n',
            "csrc/blocks/containers/b.h": '#include <vector>\n#include "core/a.h"\n',
            "csrc/blocks/containers/deep/c.h": '#include "containers/b.h"\n',
            "csrc/blocks/steps/d.cpp": '#include "core/a.h"\n',
            "csrc/cpu/e.h": '#include "core/a.h"\n',
        },
        ["circle: containers -> core -> containers"],
    ),
    (
        rules.links_lead_somewhere,
        {
            "README.md": "[a](docs/a.md#so-it-is) [b](docs/a.md#other) [c](https://a.b/c#d)\n",
            "docs/a.md": "# So, it `is`\n[a](#so-it-is) [b](b.md)\n[c](#c) [d](adr/)\n",
            "docs/adr/README.md": "",
        },
        [
            "README.md:1: links to docs/a.md#other",
            "docs/a.md:2: links to b.md#",
            "docs/a.md:3: links to #c",
        ],
    ),
    (rules.the_readme_is_short, {"README.md": "\n" * 131}, ["README.md: 131 lines"]),
    (
        rules.the_documents_are_short,
        {
            "docs/a.md": "\n" * 1_900,
            "docs/b.md": "\n" * 101,
            "docs/reference/b.md": "\n" * 3_000,
            "docs/adr/c.md": "\n" * 450,
        },
        ["docs: 2001 lines"],
    ),
    (
        rules.kernels_include_no_torch,
        {"csrc/include/a.h": "#include <vector>\n#include <ATen/core/Tensor.h>\n"},
        ["csrc/include/a.h:2: #include <ATen/core/Tensor.h>"],
    ),
    (
        rules.test_folders_are_no_packages,
        {"tests/unit/__init__.py": ""},
        ["tests/unit/__init__.py"],
    ),
    (
        rules.test_files_have_names_of_their_own,
        {"tests/unit/test_a.py": "", "tests/rpc/test_a.py": "", "tests/rpc/test_b.py": ""},
        ["tests: 2 files named test_a.py"],
    ),
    (
        rules.nothing_is_left_unfinished,
        {
            "engine/a.py": "\n# TO" + "DO: later\n",
            "tests/b.py": "@pytest.mark." + "skip\n",
            ".ci/run": "# FIX" + "ME\n",
        },
        [
            "engine/a.py:2: TO" + "DO",
            "tests/b.py:1: pytest.mark." + "skip",
            ".ci/run:1: FIX" + "ME",
        ],
    ),
]


@pytest.mark.parametrize("rule", [r for r, _, _ in PLANTED], ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule_that(rule: Rule) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize(
    ("rule", "files", "faults"), PLANTED, ids=[r.__name__ for r, _, _ in PLANTED]
)
def test_a_planted_fault_breaks_the_rule_that(
    rule: Rule, files: dict[str, str], faults: list[str], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(rule(tmp_path)) == sorted(faults)


def test_every_rule_has_a_planted_fault() -> None:
    written = {
        name
        for name, value in vars(rules).items()
        if callable(value) and getattr(value, "__annotations__", {}).get("return") == "list[str]"
    }
    assert written == {rule.__name__ for rule, _, _ in PLANTED}


def test_the_formatter_of_cpp_leaves_drawings_in_comments_alone() -> None:
    drawing = "// a" + " ──► b" * 30 + "\nint a;\n"
    formatter = [Path(sys.executable).parent / "clang-format", "--assume-filename=csrc/a.cpp"]
    done = subprocess.run(formatter, input=drawing, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == drawing


def test_the_sdk_and_the_control_plane_run_without_torch() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in ("kvplane", "control_plane")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name not in ("__main__.py", "__init__.py")
        and not {"transformers", "runtime"} & set(path.parts)  # these are extras
    ]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, *modules], cwd=ROOT, check=True, timeout=60)


def test_the_core_of_the_control_plane_runs_without_grpc() -> None:
    program = "import sys, control_plane.core\nsys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_the_control_plane_says_how_grpc_polls_before_grpc_is_imported() -> None:
    program = "import sys, control_plane.__main__\nsys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
