"""The contract and its stubs: the stubs are what the protos generate, and the protos keep rules
that ``buf lint`` does not know.

The compiler is that of scripts/protos.sh, which downloads it the first time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

ROOT = Path(__file__).resolve().parent.parent
CALLERS = ("types", "local", "pool", "prefix", "session", "execution")
PLANES = ("plan", "registration")
PROTOS = {
    **{name: f"kvplane/v1/{name}.proto" for name in CALLERS},
    **{name: f"kvplane/plane/v1/{name}.proto" for name in PLANES},
    "push": "integrations/push/push.proto",
}

# A number that measures something says in what: its name ends in a unit or begins with num_.
QUANTITY = re.compile(r"size|length|duration|time|delay|capacity|memory")
UNITS = ("_tokens", "_bytes", "_blocks", "_s", "_ms")
UNITLESS = {
    "head_size",
    "value_head_size",
    "page_size",
}  # elements of a vector, or of a list: the field's name everywhere else


def compile_protos(*args: str, folder: Path = ROOT / "protos") -> None:
    command = [str(ROOT / "scripts" / "protos.sh"), f"-I{folder}", f"-I{ROOT}", *args]
    command += PROTOS.values()
    env = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def describe(out: Path, folder: Path = ROOT / "protos") -> dict[str, FileDescriptorProto]:
    target = out / "protos.bin"
    compile_protos("--include_source_info", f"--descriptor_set_out={target}", folder=folder)
    files = FileDescriptorSet.FromString(target.read_bytes()).file
    return {Path(f.name).stem: f for f in files}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FileDescriptorProto]:
    return describe(tmp_path_factory.mktemp("protos"))


def messages(file: FileDescriptorProto) -> Iterator[DescriptorProto]:
    pending = list(file.message_type)
    while pending:
        message = pending.pop()
        yield message
        pending.extend(message.nested_type)


def uncommented(file: FileDescriptorProto) -> list[tuple[int, ...]]:
    """Descriptor paths of everything declared in ``file`` that has no comment, neither before it
    nor behind it on its line. The comment of a method is also that of its request and response.
    """
    commented = {
        tuple(p.path)
        for p in file.source_code_info.location
        if p.leading_comments.strip() or p.trailing_comments.strip()
    }

    def walk(message: DescriptorProto, path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        yield path
        yield from ((*path, 2, i) for i in range(len(message.field)))
        for i, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:  # the comment of a map is that of its field
                yield from walk(nested, (*path, 3, i))

    wanted: list[tuple[int, ...]] = []
    of_methods = {
        type_name.rpartition(".")[2]
        for service in file.service
        for method in service.method
        for type_name in (method.input_type, method.output_type)
    }
    for i, message in enumerate(file.message_type):
        paths = list(walk(message, (4, i)))
        wanted += paths[1:] if message.name in of_methods else paths
    for i, enum in enumerate(file.enum_type):
        wanted += [(5, i), *((5, i, 2, j) for j in range(len(enum.value)))]
    for i, service in enumerate(file.service):
        wanted += [(6, i), *((6, i, 2, j) for j in range(len(service.method)))]
    return [path for path in wanted if path not in commented]


def without_repeat_rule(file: FileDescriptorProto) -> list[str]:
    """Methods of which neither their comment nor their service's says what a repeat does."""
    comments = {tuple(p.path): p.leading_comments for p in file.source_code_info.location}
    return [
        method.name
        for i, service in enumerate(file.service)
        for j, method in enumerate(service.method)
        if "repeat" not in (comments[6, i] + comments[6, i, 2, j]).lower()
    ]


def without_units(file: FileDescriptorProto) -> list[str]:
    """Number fields that are named like a size or a time and say no unit."""
    numbers = {
        FieldDescriptorProto.TYPE_INT32,
        FieldDescriptorProto.TYPE_INT64,
        FieldDescriptorProto.TYPE_UINT32,
        FieldDescriptorProto.TYPE_UINT64,
        FieldDescriptorProto.TYPE_FLOAT,
        FieldDescriptorProto.TYPE_DOUBLE,
    }
    return [
        f"{message.name}.{field.name}"
        for message in messages(file)
        for field in message.field
        if field.type in numbers
        and QUANTITY.search(field.name)
        and not field.name.endswith(UNITS)
        and not field.name.startswith("num_")
        and field.name not in UNITLESS
    ]


def test_the_committed_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / "protos.sh")]
    env = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    generated, committed = (
        {
            f"{folder}/{p.name}": p.read_text()
            for folder in (
                "kvplane/v1",
                "kvplane/plane/v1",
                "kvplane/wire/v1",
                "kvplane/wire/plane/v1",
                "integrations/push",
            )
            for p in (root / folder).glob("*_pb2*")
        }
        for root in (tmp_path, ROOT)
    )
    assert sorted(committed) == sorted(generated)
    stale = [name for name, text in generated.items() if committed[name] != text]
    assert not stale, f"run make protos: {stale}"


def test_everything_in_the_contract_has_a_comment(files: dict[str, FileDescriptorProto]) -> None:
    assert {name: uncommented(files[name]) for name in PROTOS} == {name: [] for name in PROTOS}


def test_every_method_says_what_a_repeat_does(files: dict[str, FileDescriptorProto]) -> None:
    names = (*CALLERS, *PLANES)
    assert {name: without_repeat_rule(files[name]) for name in names} == {
        name: [] for name in names
    }


def test_every_measure_in_the_contract_says_its_unit(
    files: dict[str, FileDescriptorProto],
) -> None:
    assert [field for name in PROTOS for field in without_units(files[name])] == []


@pytest.mark.parametrize(("names", "most"), [(CALLERS, 1000), (PLANES, 400)])
def test_the_contract_can_be_read_in_one_sitting(names: tuple[str, ...], most: int) -> None:
    files = [(ROOT / "protos" / PROTOS[name]).read_text() for name in names]
    assert sum(len(text.splitlines()) for text in files) <= most


PLANTED = """
syntax = "proto3";
package kvplane.v1;
// Commented.
service Planting {
  // Commented.
  rpc Plant(PlantRequest) returns (PlantResponse);
}
message PlantRequest {
  string name = 1;  // Commented.
}
message PlantResponse {
  string name = 1;
}
message PlantError {}
// Commented.
message Planted {
  int64 buffer_size = 1;
  // Commented, and measured in bytes.
  int64 buffer_size_bytes = 2;
  bool is_full = 3;  // Commented behind it.
  bool is_open = 4;
  // Commented.
  message Inner {
    string name = 1;
  }
}
"""


def test_a_field_with_no_comment_or_no_unit_is_found(tmp_path: Path) -> None:
    for path in PROTOS.values():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text('syntax = "proto3";\n')
    (tmp_path / PROTOS["types"]).write_text(PLANTED)
    file = describe(tmp_path, folder=tmp_path)["types"]
    assert uncommented(file) == [
        (4, 1, 2, 0),
        (4, 2),
        (4, 3, 2, 0),
        (4, 3, 2, 3),
        (4, 3, 3, 0, 2, 0),
    ]
    assert without_units(file) == ["Planted.buffer_size"]
    assert without_repeat_rule(file) == ["Plant"]
