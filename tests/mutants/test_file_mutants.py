"""Faults of the file tier, each of which a test of it must notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from control_plane.pools import shards
from control_plane.pools.shards import FileForgets
from data_plane.files import block_files, names
from data_plane.files.block_files import BlockFiles, FileIndex
from data_plane.files.record import HEADER_BYTES, BlockKey
from data_plane.plans.contents import reused_blocks
from data_plane.plans.contents.reused_blocks import ReusedBlocks
from data_plane.server import file_tier as tier
from data_plane.server.file_tier import FileTier, FileWriter
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from tests.helpers.patched_faults import Run, assert_noticed, load

FILES = load("unit/files/test_block_files.py")
REUSED = load("unit/plans/test_reused_blocks.py")
FORGETS = load("unit/registration/test_file_forgets.py")
TIER = load("rpc/test_file_tier.py")
TIER.PATIENCE_S = 5.0


def files_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """A name may stand for what is not on the disk yet."""

    def write(self: BlockFiles, path: Path, *parts: bytes) -> None:
        fd = self._disk.create(path)
        for part in parts:
            self._disk.write(fd, part)
        self._disk.close(fd)

    patch.setattr(BlockFiles, "_write_whole", write)


def files_are_written_under_their_names(patch: pytest.MonkeyPatch) -> None:
    """Half a file has the name of a whole one."""
    original = BlockFiles._write_whole

    def write(self: BlockFiles, path: Path, header: bytes, data: bytes) -> None:
        key_name = block_files.read_header(header)[0].name
        original(self, self._path(key_name), header, data)
        self._path(key_name).rename(path)

    patch.setattr(BlockFiles, "_write_whole", write)


def temporary_files_stay(patch: pytest.MonkeyPatch) -> None:
    """What a killed process was writing takes room for ever."""
    original = BlockFiles._remove

    def remove(self: BlockFiles, path: Path) -> None:
        if path.suffix != ".tmp":
            original(self, path)

    patch.setattr(BlockFiles, "_remove", remove)


def data_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    """A bit that flipped on the disk is served."""
    patch.setattr(block_files, "read_data", lambda content, key: content[HEADER_BYTES:])


def any_whole_file_will_do(patch: pytest.MonkeyPatch) -> None:
    """A file is right if its checksums are."""
    original = block_files.read_data

    def read(content: memoryview, key: BlockKey) -> memoryview:
        return original(content, block_files.read_header(content[:HEADER_BYTES])[0])

    patch.setattr(block_files, "read_data", read)


def parents_are_evicted_first(patch: pytest.MonkeyPatch) -> None:
    """The oldest goes, with all that hangs from it still there."""
    patch.setattr(FileIndex, "oldest", lambda self, keep=b"": next(iter(self._nodes)))


def writes_outlive_a_forget(patch: pytest.MonkeyPatch) -> None:
    """A file that is being written comes into being after its prefix was forgotten."""
    original = BlockFiles.forget

    def forget(self: BlockFiles, **what: Any) -> None:
        original(self, **what)
        self._num_forgotten.clear()

    patch.setattr(BlockFiles, "forget", forget)


def only_writes_notice_a_forget(patch: pytest.MonkeyPatch) -> None:
    """What was read, and forgotten before it was written, is written."""
    original = BlockFiles.write
    patch.setattr(BlockFiles, "write", lambda self, key, data, num=None: original(self, key, data))


def any_forget_stops_all_writes(patch: pytest.MonkeyPatch) -> None:
    """One that forgets often keeps others from writing files."""
    original = BlockFiles.forget

    def forget(self: BlockFiles, **what: Any) -> None:
        original(self, **what)
        self._num_forgotten[b""] += 1

    patch.setattr(BlockFiles, "forget", forget)


def a_forget_drops_what_others_reuse(patch: pytest.MonkeyPatch) -> None:
    """One that forgets often keeps others from writing files."""
    patch.setattr(ReusedBlocks, "drop", lambda self, tenant: self.take())


def an_error_of_torch_ends_the_writer(patch: pytest.MonkeyPatch) -> None:
    """After memory was short nothing is written any more."""
    original = FileWriter._write

    def write(self: FileWriter, prefix: Any) -> None:
        try:
            original(self, prefix)
        except RuntimeError:
            self._is_stopping = True

    patch.setattr(FileWriter, "_write", write)


def names_are_of_their_block_alone(patch: pytest.MonkeyPatch) -> None:
    """Equal tokens after different ones have one name."""

    def block_names(root: bytes, token_ids: bytes, block_size_tokens: int) -> Iterator[bytes]:
        size = 4 * block_size_tokens
        for begin in range(0, len(token_ids) - size + 1, size):
            yield names._digest(b"block", root, token_ids[begin : begin + size])

    patch.setattr(FILES, "block_names", block_names)


def namespaces_share_files(patch: pytest.MonkeyPatch) -> None:
    """Whoever has the tokens finds the file."""
    patch.setattr(tier, "scope_of", lambda *_: names.scope_of(b"", "", ""))


def computed_blocks_count_as_found(patch: pytest.MonkeyPatch) -> None:
    """Everything is written once it is published."""
    patch.setattr(reused_blocks, "_num_leading", len)


def unpublished_blocks_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """What came from the host tier is never written."""
    patch.setattr(reused_blocks, "_MOST_LOOKS", 1)


def missing_blocks_are_read_as_zeros(patch: pytest.MonkeyPatch) -> None:
    """A load goes on past a file that is wrong."""
    original = FileTier._read

    def read(self: FileTier, keys: Any) -> list[Any]:
        found = original(self, keys)
        zeros = memoryview(bytearray(keys[0].length))
        return found + [zeros] * (len(keys) - len(found))

    patch.setattr(FileTier, "_read", read)


def misses_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Nobody learns that files are wrong."""
    patch.setattr("data_plane.server.file_tier.FileCounts.missed", lambda self, reason: None)


def an_error_ends_the_writer(patch: pytest.MonkeyPatch) -> None:
    """After a full disk nothing is written any more."""
    original = FileWriter._write

    def write(self: FileWriter, prefix: Any) -> None:
        original(self, prefix)
        if self._counts.num_write_errors:
            self._is_stopping = True

    patch.setattr(FileWriter, "_write", write)


def shards_are_told_once(patch: pytest.MonkeyPatch) -> None:
    """What a shard did not hear is not forgotten there."""
    patch.setattr(FileForgets, "of_shard", lambda self, index: [])


def long_forgets_are_kept_whole(patch: pytest.MonkeyPatch) -> None:
    """One prefix may take any room for as long as a shard is away."""
    patch.setattr(FileForgets, "_kept", lambda self, message: message)


def long_forgets_count_as_short_ones(patch: pytest.MonkeyPatch) -> None:
    """Token ids that wait to be told take any room."""
    patch.setattr(shards, "_size", lambda message: 1)


def a_tenant_forgets_the_files_of_all(patch: pytest.MonkeyPatch) -> None:
    """One that forgets much deletes what others have."""
    original = FileForgets.add

    def add(self: FileForgets, message: Any) -> Any:
        told = original(self, message)
        if told[0].forget_files.all_namespaces:
            self._early.clear()
            self._early[message.tenant] = [rpb.ForgetFiles(all_tenants=True)]
        return told

    patch.setattr(FileForgets, "add", add)


def prefixes_that_wait_are_not_bounded(patch: pytest.MonkeyPatch) -> None:
    """Every prefix that a session finds is kept until a receipt comes."""

    def add(self: ReusedBlocks, noted: Any) -> None:
        self._noted.append(noted)
        self._on_reuse()

    patch.setattr(ReusedBlocks, "_add", add)


def unit(test: Callable[..., None], *more: Any) -> Run:
    def run(folder: Path, patch: pytest.MonkeyPatch) -> None:
        names_of = test.__code__.co_varnames[: test.__code__.co_argcount]
        arguments = list(more)
        files = FILES.opened(folder) if "files" in names_of else None
        given = {"tmp_path": folder, "monkeypatch": patch, "files": files}
        named = {name: given[name] for name in names_of if name in given}
        rest = [name for name in names_of if name not in given]
        test(**named, **dict(zip(rest, arguments, strict=True)))

    return run


def served(test: Callable[..., Any], *more: Any) -> Run:
    def run(folder: Path, patch: pytest.MonkeyPatch) -> None:
        takes_patch = "monkeypatch" in test.__code__.co_varnames[: test.__code__.co_argcount]
        asyncio.run(test(folder, *more, *([patch] if takes_patch else [])))

    return run


POWER = FILES.test_what_is_written_while_the_power_fails_is_whole_or_not_there
WRONG = FILES.test_a_file_that_is_wrong_is_a_miss_and_goes_with_all_below_it
AGAIN = TIER.test_a_file_that_is_wrong_is_computed_again
NOTICED_BY: dict[Callable[[pytest.MonkeyPatch], None], Run] = {
    files_are_not_synced: unit(POWER, "renamed"),
    files_are_written_under_their_names: unit(POWER, "sync"),
    temporary_files_stay: unit(POWER, "sync"),
    data_is_not_checked: unit(WRONG, FILES.with_other_data, "DAMAGED"),
    any_whole_file_will_do: unit(WRONG, FILES.of(parent=bytes(32)), "MISMATCH"),
    parents_are_evicted_first: unit(
        FILES.test_the_least_recently_used_makes_room_children_before_parents
    ),
    writes_outlive_a_forget: unit(FILES.test_what_is_forgotten_while_it_is_written_has_no_file),
    only_writes_notice_a_forget: served(TIER.test_what_is_forgotten_once_it_is_read_has_no_file),
    any_forget_stops_all_writes: unit(
        FILES.test_what_another_tenant_forgets_stops_no_write, "namespace"
    ),
    a_forget_drops_what_others_reuse: unit(
        REUSED.test_what_a_tenant_forgets_drops_what_it_reused_alone
    ),
    an_error_of_torch_ends_the_writer: served(TIER.test_memory_that_is_short_stops_nothing),
    names_are_of_their_block_alone: unit(FILES.test_names_differ_where_contents_may),
    namespaces_share_files: served(TIER.test_a_namespace_finds_its_own_files_alone),
    computed_blocks_count_as_found: unit(REUSED.test_what_is_computed_or_moved_is_not_told),
    unpublished_blocks_are_not_waited_for: unit(
        REUSED.test_what_comes_from_the_host_tier_is_told_when_it_is_published_again
    ),
    missing_blocks_are_read_as_zeros: served(AGAIN, 1),
    misses_are_not_counted: served(AGAIN, 1),
    an_error_ends_the_writer: served(TIER.test_a_full_disk_stops_nothing),
    shards_are_told_once: unit(
        FORGETS.test_what_is_told_again_is_repeated_until_each_shard_has_done_it
    ),
    long_forgets_are_kept_whole: unit(
        FORGETS.test_a_prefix_too_long_to_be_kept_is_told_as_it_is_to_shards_that_are_there
    ),
    long_forgets_count_as_short_ones: unit(FORGETS.test_long_prefixes_count_by_their_length),
    a_tenant_forgets_the_files_of_all: unit(
        FORGETS.test_one_step_of_many_forgets_leaves_other_tenants_alone
    ),
    prefixes_that_wait_are_not_bounded: unit(REUSED.test_what_waits_is_bounded),
}


@pytest.mark.parametrize("fault", NOTICED_BY, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_file_tier_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_noticed(fault, NOTICED_BY[fault], monkeypatch, tmp_path)
