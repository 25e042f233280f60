"""Files of blocks: whole or not there, within their bytes, and never another block's."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from data_plane.files.block_files import BlockFiles
from data_plane.files.disk import Disk
from data_plane.files.names import block_names, folder_name, part_name, scope_of
from data_plane.files.record import (
    HEADER_BYTES,
    BlockKey,
    FileMissError,
    encode_header,
    read_data,
)
from kvplane.errors import InvalidRequestError
from kvplane.shard import Shard

LENGTH = 1000
SIZE = 4  # tokens of a block
PART = part_name(b"layout", Shard(0, 1, 0, 2, 0, 2))
SCOPE = scope_of(b"layout", "tenant", "")
OTHER = scope_of(b"layout", "tenant", "other")


def keys(num: int, scope: tuple[bytes, bytes] = SCOPE, first_token: int = 0) -> list[BlockKey]:
    """Of a prompt's blocks."""
    tokens = b"".join(i.to_bytes(4, "little") for i in range(first_token, first_token + SIZE * num))
    names = [scope[1], *block_names(scope[1], tokens, SIZE)]
    return [BlockKey(PART, *scope, names[i], names[i + 1], LENGTH, i + 7) for i in range(num)]


def data_of(key: BlockKey) -> bytes:
    return (key.name * (LENGTH // 32 + 1))[:LENGTH]


def opened(folder: Path, num_files: int = 8, disk: Disk | None = None) -> BlockFiles:
    files = BlockFiles(
        folder, (PART, LENGTH), max_bytes=num_files * (HEADER_BYTES + LENGTH), disk=disk
    )
    files.scan()
    return files


def write(files: BlockFiles, *written: BlockKey) -> None:
    for key in written:
        assert files.write(key, data_of(key))


def blocks_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.block"))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BlockFiles]:
    files = opened(tmp_path)
    yield files
    files.check_integrity()
    files.close()


def test_what_is_written_is_read_also_by_a_later_process(tmp_path: Path) -> None:
    prompt = keys(3)
    first = opened(tmp_path)
    write(first, *prompt)
    first.close()
    later = opened(tmp_path)
    assert later.find(key.name for key in prompt) == 3
    assert [bytes(later.read(key)) for key in prompt] == [data_of(key) for key in prompt]
    assert (later.num_files, later.num_torn) == (3, 0)
    assert later.num_bytes == sum(path.stat().st_size for path in blocks_in(tmp_path))
    later.check_integrity()


def test_a_prefix_is_found_as_far_as_it_goes(files: BlockFiles) -> None:
    prompt = keys(3)
    write(files, *prompt[:2])
    assert files.find(key.name for key in prompt) == 2
    assert files.find(key.name for key in keys(3, OTHER)) == 0
    assert not files.write(keys(4)[3], data_of(keys(4)[3]))  # its parent has no file
    assert not files.write(prompt[0], data_of(prompt[0]))  # it has one


def cut_short(content: bytearray) -> None:
    del content[-1:]


def cut_in_the_header(content: bytearray) -> None:
    del content[HEADER_BYTES - 1 :]


def longer(content: bytearray) -> None:
    content += b"x"


def with_other_data(content: bytearray) -> None:
    content[-1] ^= 1


def with_another_header(content: bytearray) -> None:
    content[20] ^= 1


def of(**fields: bytes | int) -> Callable[[bytearray], None]:
    """Another block's file, in order by itself, at this one's place."""

    def fault(content: bytearray) -> None:
        data = bytes(content[HEADER_BYTES:])
        content[:HEADER_BYTES] = encode_header(replace(keys(1)[0], **fields), data)

    return fault


FAULTS: list[tuple[Callable[[bytearray], None], str]] = [
    (cut_short, "TORN"),
    (cut_in_the_header, "TORN"),
    (longer, "TORN"),
    (with_other_data, "DAMAGED"),
    (with_another_header, "DAMAGED"),
    (of(part=bytes(32)), "MISMATCH"),
    (of(tenant=bytes(32)), "MISMATCH"),
    (of(root=bytes(32)), "MISMATCH"),
    (of(parent=bytes(32)), "MISMATCH"),
    (of(name=bytes(32)), "MISMATCH"),
    (of(length=LENGTH - 1), "MISMATCH"),
]


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
def test_a_file_that_is_wrong_is_a_miss_and_goes_with_all_below_it(
    files: BlockFiles, tmp_path: Path, fault: Callable[[bytearray], None], reason: str
) -> None:
    prompt = keys(3)
    write(files, *prompt)
    path = next(path for path in blocks_in(tmp_path) if path.stem == prompt[0].name.hex())
    content = bytearray(path.read_bytes())
    fault(content)
    path.write_bytes(content)
    with pytest.raises(FileMissError) as caught:
        files.read(prompt[0])
    assert caught.value.reason == reason
    assert files.find(key.name for key in prompt) == 0
    assert blocks_in(tmp_path) == []


def test_the_generation_alone_may_differ() -> None:
    key = keys(1)[0]
    content = encode_header(replace(key, generation=99), data_of(key)) + data_of(key)
    assert read_data(memoryview(content), key) == data_of(key)


def test_a_file_that_is_gone_is_a_miss(files: BlockFiles, tmp_path: Path) -> None:
    (key,) = keys(1)
    write(files, key)
    blocks_in(tmp_path)[0].unlink()
    with pytest.raises(FileMissError, match="GONE"):
        files.read(key)
    assert files.num_files == 0


class PowerLoss(BaseException):
    """The machine goes out here."""


class Stops(Disk):
    """A disk on which one call fails. Of a machine that goes out there, ``lose`` loses what was not
    synced by then, in a file of any name.
    """

    def __init__(self, call: str, error: BaseException) -> None:
        self.call, self._error = call, error
        self._unsynced: dict[int, int] = {}  # inode by descriptor

    def create(self, path: Path) -> int:
        self._maybe("create")
        return super().create(path)

    def write(self, fd: int, data: bytes) -> None:
        self._unsynced[fd] = os.fstat(fd).st_ino
        super().write(fd, data[:10])
        self._maybe("write")
        super().write(fd, data[10:])

    def sync(self, fd: int) -> None:
        self._maybe("sync")
        super().sync(fd)
        self._unsynced.pop(fd, None)

    def rename(self, old: Path, new: Path) -> None:
        self._maybe("rename")
        super().rename(old, new)
        self._maybe("renamed")

    def lose(self, folder: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file() and path.stat().st_ino in self._unsynced.values():
                os.truncate(path, path.stat().st_size // 2)

    def _maybe(self, call: str) -> None:
        if call == self.call:
            raise self._error


@pytest.mark.parametrize("call", ["write", "sync", "rename", "renamed"])
def test_what_is_written_while_the_power_fails_is_whole_or_not_there(
    tmp_path: Path, call: str
) -> None:
    (key,) = keys(1)
    disk = Stops(call, PowerLoss())
    files = opened(tmp_path, disk=disk)
    with pytest.raises(PowerLoss):
        files.write(key, data_of(key))
    files.close()
    disk.lose(tmp_path)
    later = opened(tmp_path)
    assert not [*tmp_path.glob("*.tmp")]
    assert later.num_torn == 0
    assert later.num_files == (call == "renamed")
    if later.num_files:
        assert later.read(key) == data_of(key)


def test_a_start_removes_what_is_torn_or_has_lost_its_parent(tmp_path: Path) -> None:
    prompt = keys(3)
    files = opened(tmp_path)
    write(files, *prompt, *keys(1, OTHER))
    files.close()
    paths = {path.stem: path for path in blocks_in(tmp_path)}
    os.truncate(paths[prompt[1].name.hex()], 10)
    (tmp_path / "new-9.tmp").write_bytes(b"half")
    (paths[prompt[0].name.hex()].parent / "other.block").write_bytes(b"not ours")
    later = opened(tmp_path)
    later.check_integrity()
    assert later.find(key.name for key in prompt) == 1
    assert later.find([keys(1, OTHER)[0].name]) == 1
    assert later.num_torn == 3
    assert len(blocks_in(tmp_path)) == 2
    assert not [*tmp_path.glob("*.tmp")]


def test_files_of_another_part_or_size_are_not_used(tmp_path: Path) -> None:
    files = opened(tmp_path)
    write(files, *keys(1))
    files.close()
    other = BlockFiles(tmp_path, (bytes(32), LENGTH), max_bytes=2**20)
    other.scan()
    assert (other.num_files, other.num_torn) == (0, 1)


def test_the_least_recently_used_makes_room_children_before_parents(tmp_path: Path) -> None:
    files = opened(tmp_path, num_files=5)
    (used,), old, new = keys(1, first_token=100), keys(3), keys(2, OTHER)
    write(files, used, *old, new[0])
    assert files.find([used.name]) == 1
    write(files, new[1])  # in place of the old one's last block
    files.check_integrity()
    assert files.find(key.name for key in old) == 2
    assert files.find(key.name for key in new) == 2
    assert files.find([used.name]) == 1
    assert (files.num_files, files.num_evicted) == (5, 1)
    assert len(blocks_in(tmp_path)) == 5


def test_a_block_for_which_its_parents_would_have_to_go_is_not_written(tmp_path: Path) -> None:
    files = opened(tmp_path, num_files=2)
    prompt = keys(3)
    write(files, *prompt[:2])
    assert not files.write(prompt[2], data_of(prompt[2]))
    files.check_integrity()
    assert files.find(key.name for key in prompt) == 2


def test_a_later_process_keeps_the_order_and_its_own_bytes(tmp_path: Path) -> None:
    files = opened(tmp_path)
    prompts = [keys(1, first_token=100 * i)[0] for i in range(4)]
    write(files, *prompts)
    for age, key in enumerate(prompts):
        path = next(path for path in blocks_in(tmp_path) if path.stem == key.name.hex())
        os.utime(path, (1000 + age, 1000 + age))
    files.read(prompts[0])
    files.close()
    later = opened(tmp_path, num_files=2)
    assert [later.find([key.name]) for key in prompts] == [1, 0, 0, 1]
    assert len(blocks_in(tmp_path)) == 2


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename"])
def test_a_write_that_fails_leaves_nothing_and_can_be_made_again(tmp_path: Path, call: str) -> None:
    disk = Stops(call, OSError(errno.ENOSPC, "no space left on device"))
    files = opened(tmp_path, disk=disk)
    (key,) = keys(1)
    with pytest.raises(OSError, match="no space"):
        files.write(key, data_of(key))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lock"]
    disk.call = ""
    write(files, key)
    assert files.read(key) == data_of(key)


@pytest.mark.parametrize("what", ["name", "root", "tenant", "everything"])
def test_what_is_forgotten_has_no_file(files: BlockFiles, tmp_path: Path, what: str) -> None:
    prompt, other = keys(3), keys(2, OTHER)
    strange = keys(1, scope_of(b"layout", "stranger", ""))
    write(files, *prompt, *other, *strange)
    files.forget(
        name=prompt[1].name if what == "name" else b"",
        root=SCOPE.root if what == "root" else b"",
        tenant=SCOPE.tenant if what == "tenant" else b"",
        everything=what == "everything",
    )
    left = {"name": [1, 2, 1], "root": [0, 2, 1], "tenant": [0, 0, 1], "everything": [0, 0, 0]}
    found = [files.find(key.name for key in each) for each in (prompt, other, strange)]
    assert found == left[what]
    assert len(blocks_in(tmp_path)) == sum(found)


class Waits(Disk):
    """Stops before it syncs, until it may go on."""

    def __init__(self) -> None:
        self.arrived, self.may_go_on = threading.Event(), threading.Event()

    def sync(self, fd: int) -> None:
        self.arrived.set()
        assert self.may_go_on.wait(10)
        super().sync(fd)


STRANGER = scope_of(b"layout", "stranger", "")
FORGETS: dict[str, dict[str, bytes]] = {
    "the tenant": {"tenant": SCOPE.tenant},
    "another tenant": {"tenant": STRANGER.tenant},
    "another tenant's namespace": {"tenant": STRANGER.tenant, "root": STRANGER.root},
    "another tenant's prefix": {"tenant": STRANGER.tenant, "name": keys(1, STRANGER)[0].name},
}


@pytest.mark.parametrize("forgotten", FORGETS)
def test_what_is_forgotten_while_it_is_written_has_no_file_and_all_else_has(
    tmp_path: Path, forgotten: str
) -> None:
    disk = Waits()
    files = opened(tmp_path, disk=disk)
    (key,) = keys(1)
    results: list[bool] = []
    writer = threading.Thread(target=lambda: results.append(files.write(key, data_of(key))))
    writer.start()
    assert disk.arrived.wait(10)
    files.forget(**FORGETS[forgotten])  # type: ignore[arg-type]
    disk.may_go_on.set()
    writer.join(10)
    is_written = forgotten != "the tenant"
    assert results == [is_written]
    assert files.find([key.name]) == len(blocks_in(tmp_path)) == is_written
    assert not [*tmp_path.glob("*.tmp")]


def test_what_is_forgotten_since_it_was_read_has_no_file(files: BlockFiles) -> None:
    (key,), (other,) = keys(1), keys(1, OTHER)
    num_forgotten = files.num_forgotten(SCOPE.tenant)
    files.forget(tenant=SCOPE.tenant, root=OTHER.root)
    assert not files.write(key, data_of(key), num_forgotten)
    num_forgotten = files.num_forgotten(SCOPE.tenant)
    files.forget(everything=True)
    assert not files.write(other, data_of(other), num_forgotten)
    assert files.write(other, data_of(other), files.num_forgotten(SCOPE.tenant))


class Keeps(Disk):
    """Removes nothing, while told so."""

    keeps = True

    def remove(self, path: Path) -> None:
        if self.keeps:
            raise OSError(errno.EIO, "input/output error")
        super().remove(path)


def test_what_could_not_be_removed_is_not_forgotten_until_it_is(tmp_path: Path) -> None:
    disk = Keeps()
    files = opened(tmp_path, disk=disk)
    write(files, *keys(2))
    with pytest.raises(OSError, match="2 files"):
        files.forget(root=SCOPE.root)
    disk.keeps = False
    files.forget(root=OTHER.root)
    assert blocks_in(tmp_path) == []


def test_a_checkpoint_counts_by_its_size_and_goes_before_its_block(tmp_path: Path) -> None:
    states = part_name(b"layout", Shard(0, 1, 0, 2, 0, 2), of_states=True)
    most = 3 * (HEADER_BYTES + LENGTH) + HEADER_BYTES + 2 * LENGTH
    files = BlockFiles(tmp_path, (PART, LENGTH), (states, 2 * LENGTH), max_bytes=most)
    files.scan()
    prompt, (other,) = keys(3), keys(1, OTHER)
    checkpoint = files.checkpoint_of(prompt[1])
    write(files, *prompt[:2])
    assert files.write(checkpoint, bytes(2 * LENGTH))
    write(files, prompt[2])
    assert files.num_bytes == most
    assert files.find(key.name for key in prompt) == 2
    files.close()
    files = BlockFiles(tmp_path, (PART, LENGTH), (states, 2 * LENGTH), max_bytes=most)
    files.scan()
    assert (files.num_files, files.num_bytes, files.num_torn) == (4, most, 0)
    assert files.find(key.name for key in prompt[:2]) == 2
    write(files, other)  # in place of the last block, which has no checkpoint
    assert files.find(key.name for key in prompt) == 2
    assert files.write(files.checkpoint_of(other), bytes(2 * LENGTH))
    files.check_integrity()
    assert files.find(key.name for key in prompt) == 0
    assert not files.write(files.checkpoint_of(prompt[2]), bytes(2 * LENGTH))  # it has no parent
    assert files.find([other.name]) == 1


def test_a_folder_is_used_by_one_process_and_has_room_for_a_file(tmp_path: Path) -> None:
    files = opened(tmp_path)
    with pytest.raises(InvalidRequestError, match="another process"):
        opened(tmp_path)
    files.close()
    opened(tmp_path).close()
    with pytest.raises(InvalidRequestError, match="file_tier_bytes"):
        BlockFiles(tmp_path, (PART, LENGTH), max_bytes=LENGTH)
    with pytest.raises(InvalidRequestError, match="file_tier_dir"):
        opened(tmp_path / "lock" / "below")


def test_names_differ_where_contents_may() -> None:
    one = keys(2)
    scopes = {SCOPE, OTHER, scope_of(b"layout", "ten", "ant"), scope_of(b"other", "tenant", "")}
    assert len({scope.root for scope in scopes}) == 4
    assert one[1].name != keys(1, first_token=SIZE)[0].name  # the same tokens after others
    shards = [Shard(0, 2, 0, 2, 0, 1), Shard(1, 2, 0, 2, 1, 1), Shard(1, 2, 0, 2, 0, 1, copy=1)]
    parts = [part_name(b"layout", shard) for shard in shards]
    assert parts[0] == parts[2] != parts[1]  # copies hold the same, and use other folders
    folders = [folder_name(p, "pool", s) for p, s in zip(parts, shards, strict=True)]
    assert len({*folders, folder_name(parts[0], "other", shards[0])}) == 4


def test_files_are_for_this_user_alone(tmp_path: Path) -> None:
    files = opened(tmp_path / "new")
    write(files, *keys(1))
    modes = {path.stat().st_mode & 0o77 for path in (tmp_path / "new").rglob("*")}
    assert modes | {(tmp_path / "new").stat().st_mode & 0o77} == {0}
