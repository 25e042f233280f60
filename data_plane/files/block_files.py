"""A folder of files, one for each block and each checkpoint of states, whose size is bounded.

    FOLDER/lock                  held by the process that uses the folder
    FOLDER/ab/abcdef….block      a block or a checkpoint, by its name
    FOLDER/new-1.tmp             a file that is being written; removed at the next start

A file is written under another name, synced and then renamed, so a name always stands for a whole
file. A file's contents are checked when it is read.

    root ──► block ──► block ──► block         a block's file is there only while its parent's is,
                  ├──► block                   so a search always finds a whole prefix
                  └──► checkpoint at its end

A tree of names, in the order of use, tells which files exist. The least recently used file is
evicted; one that has children counts as used instead.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Final

from data_plane.files.disk import Disk
from data_plane.files.names import checkpoint_name
from data_plane.files.record import (
    HEADER_BYTES,
    BlockKey,
    FileMissError,
    encode_header,
    read_data,
    read_header,
)
from kvplane.errors import InvalidRequestError

MAX_FILES: Final = 2**20
"""Maximum number of files in one folder; each takes some hundred bytes of memory."""
_SUFFIX: Final = ".block"
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class _Node:
    parent: bytes
    length: int
    children: set[bytes] = field(default_factory=set)


class FileIndex:
    """A tree of the files' names, in the order of use. Not thread-safe. Names have 32 bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes of all files, headers included."""
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()  # the least recently used first
        self._roots: dict[bytes, set[bytes]] = {}
        self._roots_of: dict[bytes, set[bytes]] = {}  # by tenant
        self._tenants: dict[bytes, bytes] = {}  # by root

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def may_add(self, key: BlockKey) -> bool:
        """Return whether a block's file may exist: its parent is a root or has a file."""
        return key.parent == key.root or key.parent in self._nodes

    def add(self, key: BlockKey) -> None:
        """Add a file, for whose key ``may_add`` must be true."""
        if key.name in self._nodes:
            return
        self._nodes[key.name] = _Node(key.parent, key.length)
        self.num_bytes += HEADER_BYTES + key.length
        if key.parent == key.root:
            self._roots.setdefault(key.root, set()).add(key.name)
            self._roots_of.setdefault(key.tenant, set()).add(key.root)
            self._tenants[key.root] = key.tenant
        else:
            self._nodes[key.parent].children.add(key.name)

    def use(self, name: bytes) -> bool:
        """Return whether the file exists, and mark it as the most recently used."""
        if name not in self._nodes:
            return False
        self._nodes.move_to_end(name)
        return True

    def oldest(self, keep: bytes = b"") -> bytes | None:
        """Return the least recently used file other than ``keep``; None if there is none."""
        for _ in range(len(self._nodes)):
            name = next(iter(self._nodes))
            if not self._nodes[name].children and name != keep:
                return name
            self._nodes.move_to_end(name)
        return None

    def remove(self, name: bytes) -> list[bytes]:
        """Remove a file and all below it, if it exists. Returns their names, parents first."""
        node = self._nodes.get(name)
        if node is None:
            return []
        if node.parent in self._nodes:
            self._nodes[node.parent].children.discard(name)
        elif (firsts := self._roots.get(node.parent)) is not None:
            firsts.discard(name)
            if not firsts:
                self._drop_root(node.parent)
        removed = [name]
        for each in removed:
            node = self._nodes.pop(each)
            self.num_bytes -= HEADER_BYTES + node.length
            removed += node.children
        return removed

    def remove_root(self, root: bytes) -> list[bytes]:
        """Remove all files of a namespace. Returns their names."""
        return [name for first in [*self._roots.get(root, ())] for name in self.remove(first)]

    def remove_tenant(self, tenant: bytes) -> list[bytes]:
        """Remove all files of a tenant. Returns their names."""
        roots = [*self._roots_of.get(tenant, ())]
        return [name for root in roots for name in self.remove_root(root)]

    def remove_all(self) -> list[bytes]:
        """Remove all files. Returns their names."""
        names = [*self._nodes]
        self._nodes.clear()
        self._roots.clear()
        self._roots_of.clear()
        self._tenants.clear()
        self.num_bytes = 0
        return names

    def _drop_root(self, root: bytes) -> None:
        del self._roots[root]
        tenant = self._tenants.pop(root)
        self._roots_of[tenant].discard(root)
        if not self._roots_of[tenant]:
            del self._roots_of[tenant]

    def check_integrity(self) -> None:
        """Check that the tree is consistent. Raises AssertionError."""
        for name, node in self._nodes.items():
            above = self._nodes.get(node.parent)
            names = self._roots[node.parent] if above is None else above.children
            assert name in names, "a file is not known to its parent"
            assert node.children <= self._nodes.keys(), "a child is not there"
        lengths = sum(HEADER_BYTES + node.length for node in self._nodes.values())
        assert self.num_bytes == lengths, "the bytes are not those of the files"
        assert set().union(*self._roots.values()) <= self._nodes.keys(), "a first block is missing"
        assert set().union(*self._roots_of.values()) == self._roots.keys(), "a root has no tenant"
        assert self._tenants.keys() == self._roots.keys(), "a tenant is kept of no root"


class BlockFiles:
    """The files of one shard's blocks. Thread-safe.

    ``num_evicted``: files removed to make room for others. ``num_torn``: files removed by ``scan``
    because they were not of this shard, were not whole, or had lost their parent.
    """

    def __init__(
        self,
        folder: Path,
        *parts: tuple[bytes, int],
        max_bytes: int,
        disk: Disk | None = None,
    ) -> None:
        """Open a folder, which is made if it does not exist. ``parts``: the shard's share of a
        block, and that of a checkpoint if the pool keeps states: its name, see ``part_name``, and
        its size in bytes. ``max_bytes``: the bound of all files together.

        Raises InvalidRequestError when another process uses the folder, it cannot be used, or there
        is no room for one file of each part.
        """
        self.num_evicted = self.num_torn = 0
        self._folder = folder
        self._parts = parts
        self._max_bytes = max_bytes
        least = sum(HEADER_BYTES + length for _, length in parts)
        if max_bytes < least:
            raise InvalidRequestError(
                f"must be at least {least}, the size of a block in files", field="file_tier_bytes"
            )
        self._disk = disk if disk is not None else Disk()
        self._index = FileIndex()
        self._lock = threading.Lock()
        self._num_forgotten: Counter[bytes] = Counter()  # calls of forget by tenant; b"": of all
        self._num_temporary = 0
        self._left: set[Path] = set()  # files that could not be removed
        self.scanned = threading.Event()
        """Set when ``scan`` has ended."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = self._disk.lock(folder / "lock")
        except BlockingIOError as error:
            raise InvalidRequestError(
                f"{folder} is used by another process", field="file_tier_dir"
            ) from error
        except OSError as error:
            raise InvalidRequestError(
                f"{folder} cannot be used: {error}", field="file_tier_dir"
            ) from error

    @property
    def num_files(self) -> int:
        """Number of files."""
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, headers included."""
        return self._index.num_bytes

    def close(self) -> None:
        """Unlock the folder, so that another process can use it."""
        self._disk.close(self._lock_fd)

    def scan(self, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """Find the files that an earlier process left, and remove invalid ones. Reads headers
        alone. Called once, before any write. No file is found until it ends, and none if it ends
        early because ``is_stopping`` returns True.
        """
        try:
            self._scan(is_stopping)
        finally:
            self.scanned.set()

    def _scan(self, is_stopping: Callable[[], bool]) -> None:
        for path in self._folder.glob("*.tmp"):
            self._remove(path)
        found: list[tuple[float, BlockKey]] = []
        for path in self._folder.glob(f"??/*{_SUFFIX}"):
            if is_stopping():
                return
            try:
                status = path.lstat()
                key, _ = read_header(self._disk.read(path, HEADER_BYTES))
                is_whole = status.st_size == HEADER_BYTES + key.length
                is_own = (key.part, key.length) in self._parts
                if not is_own or not is_whole or path != self._path(key.name):
                    raise FileMissError("MISMATCH")
                found.append((status.st_mtime, key))
            except (OSError, FileMissError):
                self.num_torn += 1
                self._remove(path)
        with self._lock:
            self._add_found(found)

    def _add_found(self, found: list[tuple[float, BlockKey]]) -> None:
        """Add found files to the index, parents first. Removes those without a parent, and those
        beyond the bound.
        """
        below: dict[bytes, list[BlockKey]] = {}
        for _, key in found:
            below.setdefault(key.parent, []).append(key)
        firsts = [key for _, key in found if key.parent == key.root]
        for key in firsts:
            self._index.add(key)
            firsts += below.pop(key.name, [])
        for _, key in sorted(found, key=lambda each: each[0]):
            if not self._index.use(key.name):
                self.num_torn += 1
                self._remove(self._path(key.name))
        while self._is_full(0):
            self._evict()
        _LOGGER.info("file tier folder=%s files=%d", self._folder, len(self._index))

    def find(self, names: Iterable[bytes]) -> int:
        """Return how many leading blocks of a prompt, with these names, have files; in a pool that
        keeps states, up to the last that has a checkpoint. Files are marked as used now.
        """
        found = [*takewhile(self.use, names)]
        while found and len(self._parts) > 1 and not self.use(checkpoint_name(found[-1])):
            found.pop()
        return len(found)

    def use(self, name: bytes) -> bool:
        """Return whether a file exists, and mark it as used now."""
        with self._lock:
            return self._index.use(name)

    def key_of(
        self, tenant: bytes, root: bytes, parent: bytes, name: bytes, generation: int = 0
    ) -> BlockKey:
        """Return the key of a block's file here. ``generation``: the block's in the pool."""
        part, length = self._parts[0]
        return BlockKey(part, tenant, root, parent, name, length, generation)

    def checkpoint_of(self, key: BlockKey, generation: int = 0) -> BlockKey:
        """Return the key of the checkpoint at the end of a block that has ``key``."""
        (_, (part, length)), name = self._parts, checkpoint_name(key.name)
        return replace(
            key, part=part, parent=key.name, name=name, length=length, generation=generation
        )

    def num_forgotten(self, tenant: bytes) -> int:
        """Return how many ``forget`` calls so far may have concerned a tenant."""
        with self._lock:
            return self._num_forgotten[tenant] + self._num_forgotten[b""]

    def write(self, key: BlockKey, data: bytes, num_forgotten: int | None = None) -> bool:
        """Write a block's file, evicting others to make room. Returns False if it was not written:
        it exists, its parent does not, there is no room for both, or files of the tenant were
        forgotten meanwhile. ``num_forgotten``: the method's result before the data was read; None
        for now. Raises OSError.
        """
        if num_forgotten is None:
            num_forgotten = self.num_forgotten(key.tenant)
        if len(data) != key.length:
            raise ValueError(f"{len(data)} bytes instead of {key.length}")
        with self._lock:
            self._index.use(key.parent)
            if key.name in self._index or not self._index.may_add(key):
                return False
            while self._is_full(HEADER_BYTES + key.length):
                if not self._evict(keep=key.parent):
                    return False
            self._num_temporary += 1
            new = self._folder / f"new-{self._num_temporary}.tmp"
        path = self._path(key.name)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._write_whole(new, encode_header(key, data), data)
            with self._lock:
                counts = self._num_forgotten
                is_forgotten = num_forgotten != counts[key.tenant] + counts[b""]
                if is_forgotten or not self._index.may_add(key):
                    self._remove(new)
                    return False
                self._disk.rename(new, path)
                self._index.add(key)
        except OSError:
            self._remove(new)
            raise
        return True

    def _write_whole(self, path: Path, *parts: bytes) -> None:
        fd = self._disk.create(path)
        try:
            for part in parts:
                self._disk.write(fd, part)
            self._disk.sync(fd)  # before it gets the name under which it is found
        finally:
            self._disk.close(fd)

    def read(self, key: BlockKey) -> memoryview:
        """Read a block's data. Raises FileMissError, after removing the file and those below it."""
        path = self._path(key.name)
        try:
            data = read_data(self._disk.read(path, HEADER_BYTES + key.length + 1), key)
        except FileMissError:
            self.drop(key.name)
            raise
        except FileNotFoundError as error:
            self.drop(key.name)
            raise FileMissError("GONE") from error
        except OSError as error:
            self.drop(key.name)
            raise FileMissError("UNREADABLE") from error
        with suppress(OSError):  # only the order of use after a restart needs the time
            self._disk.touch(path)
        return data

    def drop(self, name: bytes) -> None:
        """Remove a file and its descendants."""
        with self._lock:
            names = self._index.remove(name)
        self._remove_all(names)

    def forget(
        self, *, tenant: bytes = b"", root: bytes = b"", name: bytes = b"", everything: bool = False
    ) -> None:
        """Remove all files of a root, of the prefixes that begin with a block, or of a tenant (of
        all tenants if none is given), and cancel the writes of such files. Waits for ``scan``.
        Returns when the files are gone. Raises OSError when one could not be removed; another call
        tries that again.
        """
        self.scanned.wait()
        with self._lock:
            self._num_forgotten[b"" if everything else tenant] += 1
            if everything:
                names = self._index.remove_all()
            elif root:
                names = self._index.remove_root(root)
            elif name:
                names = self._index.remove(name)
            else:
                names = self._index.remove_tenant(tenant)
            left, self._left = self._left, set()
        self._remove_all(names)
        for path in left:
            self._remove(path)
        if self._left:
            raise OSError(f"{len(self._left)} files could not be removed")

    def check_integrity(self) -> None:
        """Check that the index is consistent and within its bounds. Raises AssertionError."""
        with self._lock:
            self._index.check_integrity()
            assert not self._is_full(0)

    def _is_full(self, num_bytes: int) -> bool:
        """Return whether there is no room for a file of so many bytes, of all together for 0."""
        num_files = len(self._index) + bool(num_bytes)
        return num_files > MAX_FILES or self._index.num_bytes + num_bytes > self._max_bytes

    def _evict(self, keep: bytes = b"") -> bool:
        """Evict a file other than ``keep``. Returns False if there is none."""
        name = self._index.oldest(keep)
        if name is None:
            return False
        self._index.remove(name)
        self.num_evicted += 1
        self._remove(self._path(name))
        return True

    def _path(self, name: bytes) -> Path:
        text = name.hex()
        return self._folder / text[:2] / (text + _SUFFIX)

    def _remove_all(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._remove(self._path(name))

    def _remove(self, path: Path) -> None:
        try:
            self._disk.remove(path)
        except FileNotFoundError:
            return
        except OSError as error:
            self._left.add(path)
            _LOGGER.warning("%s was not removed: %s", path, os.strerror(error.errno or 0))
