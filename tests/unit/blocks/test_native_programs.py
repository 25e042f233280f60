"""The C++ parts that Python does not see are right, under AddressSanitizer and
UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from tests.helpers.native.native_programs import PROGRAMS, SOURCES, built, cmake

WRITER = "test_proto_writer"
NAMES = sorted({path.stem for path in PROGRAMS.glob("test_*.cpp")} - {WRITER})
LARGEST = 2**64 - 1
# Compilers share the machine with other tests.
pytestmark = pytest.mark.timeout(600)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_program_ends_well(name: str, tmp_path: Path) -> None:
    program = built(name, tmp_path)
    done = subprocess.run([program], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.nightly
def test_protobuf_reads_what_the_writer_writes(tmp_path: Path) -> None:
    program = built(WRITER, tmp_path)
    written = subprocess.run([program], capture_output=True, check=True)
    messages = list(cut(written.stdout))
    values = [0, *(v for bit in range(64) for v in (1 << bit, (1 << bit) - 1)), LARGEST]
    texts = [b"", *(t for bit in range(64) for t in (b"a" * bit, b"\0" * 5 * bit)), b"z" * 70000]
    read = message_class()
    for value, text, encoded in zip(values, texts, messages, strict=True):
        narrow, wide = signed(value, 32), signed(value, 64)
        expected = read(
            int32=narrow,
            int64=wide,
            uint64=value,
            bool=value % 2 == 1,
            enum=value % 2,
            bytes=text,
            column=struct.pack("<i", narrow) * len(text),
            nested={"int32_of_nested": narrow},
        )
        assert encoded == expected.SerializeToString(deterministic=True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("program", "file", "right", "wrong", "wanted"),
    [
        (
            "test_id_map",
            "containers/id_map.h",
            "((next - home) & mask) <",
            "((next - home) & mask) >",
            "not so:",
        ),
        (
            "test_id_map",
            "containers/id_map.h",
            "size_t slot = home_of(key);",
            "size_t slot = home_of(key) + 7;",
            "AddressSanitizer",
        ),
        (
            WRITER,
            "sessions/proto_writer.h",
            "num_values * sizeof(T)",
            "2 * num_values * sizeof(T)",
            "AddressSanitizer",
        ),
        (
            "test_eviction",
            "eviction/lru.cpp",
            "while (!tree_.can_evict(links_[end].newer))",
            "while (false)",
            "has_idle_below",
        ),
        (
            "test_eviction",
            "eviction/lru.cpp",
            "links_[block] = {block, block};",
            "push(block);",
            "is_next",
        ),
        (
            "test_eviction",
            "eviction/idle_tree.h",
            "nodes_[block].counts == 1;",
            "nodes_[block].idle();",
            "has_idle_below",
        ),
        (
            "test_eviction",
            "eviction/reuse/age_groups.cpp",
            "links_[end].next = moved.next;",
            "links_[end].next = to;",
            "Assertion",
        ),
    ],
    ids=[
        "wrong-key-fills-a-hole",
        "slot-out-of-range",
        "column-read-past-its-end",
        "head-evicted-before-its-tail",
        "head-evicted-after-all-others",
        "idle-blocks-below-are-not-looked-at",
        "joined-group-loses-its-blocks",
    ],
)
def test_a_planted_fault_is_found(
    tmp_path: Path, program: str, file: str, right: str, wrong: str, wanted: str
) -> None:
    copy = shutil.copytree(SOURCES, tmp_path / "blocks", ignore=shutil.ignore_patterns("build"))
    source = (copy / file).read_text()
    assert source.count(right) == 1
    (copy / file).write_text(source.replace(right, wrong))
    faulty = built(program, tmp_path, copy)
    done = subprocess.run([faulty], capture_output=True, timeout=20, check=False)
    assert done.returncode != 0 and wanted in done.stderr.decode()


def test_without_the_header_of_xxhash_cmake_names_the_package_to_install(tmp_path: Path) -> None:
    hidden = "-DCMAKE_IGNORE_PATH=/usr/include;/usr/local/include"
    done = cmake("-S", str(SOURCES), "-B", str(tmp_path), hidden)
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "xxhash.h is needed (on Debian: apt install libxxhash-dev)" in said


def cut(stream: bytes) -> Iterator[bytes]:
    """The messages of ``stream``, each of which follows its length in four bytes."""
    while stream:
        (num_bytes,) = struct.unpack_from("<I", stream)
        yield stream[4 : 4 + num_bytes]
        stream = stream[4 + num_bytes :]


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def message_class() -> type[Message]:
    """A message with a field of each kind, as test_proto_writer.cpp writes them."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="written.proto", syntax="proto3")
    tier = file.enum_type.add(name="Tier")
    tier.value.add(name="NONE", number=0)
    tier.value.add(name="DEVICE", number=1)
    nested = file.message_type.add(name="Nested")
    nested.field.add(name="int32_of_nested", number=2000, type=kinds.TYPE_INT32)
    written = file.message_type.add(name="Written")
    written.field.add(name="int32", number=1, type=kinds.TYPE_INT32)
    written.field.add(name="int64", number=2, type=kinds.TYPE_INT64)
    written.field.add(name="uint64", number=3, type=kinds.TYPE_UINT64)
    written.field.add(name="bool", number=15, type=kinds.TYPE_BOOL)
    written.field.add(name="enum", number=16, type=kinds.TYPE_ENUM, type_name="Tier")
    written.field.add(name="bytes", number=18, type=kinds.TYPE_BYTES)
    written.field.add(name="column", number=19, type=kinds.TYPE_BYTES)
    written.field.add(name="nested", number=20, type=kinds.TYPE_MESSAGE, type_name="Nested")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Written"))
