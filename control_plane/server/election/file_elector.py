"""An election among the processes of one machine: a lock on a file, which the kernel releases when
its holder ends, and a file beside it with the last incarnation.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Final

from control_plane.server.election.elector import Elector, next_incarnation

_POLL_S: Final = 0.01  # for the lock; a thread that waited for it could not be stopped
_CHECK_S: Final = 1.0


class FileElector(Elector):
    """An election by a lock on the file ``path``, on a local file system. The file
    ``path``.incarnation keeps the incarnation of the last leader.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    async def win(self) -> int:
        """Wait until this process holds the lock; returns its incarnation. Raises OSError when a
        file cannot be written, ValueError for a malformed counter.
        """
        while not self._try_to_lock():
            await asyncio.sleep(_POLL_S)
        counter = self._path.with_name(f"{self._path.name}.incarnation")
        last = int(counter.read_text()) if counter.exists() else 0
        incarnation = next_incarnation(last)
        _write_durably(counter, f"{incarnation}\n")
        return incarnation

    async def hold(self) -> None:
        """Wait until the lock's file is replaced or removed: others can then lock a new one."""
        while self._is_locked():
            await asyncio.sleep(_CHECK_S)

    async def resign(self) -> None:
        """Release the lock, so that another process can lead."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _try_to_lock(self) -> bool:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_locked():
                return True
        except BlockingIOError:
            pass
        except BaseException:
            os.close(self._file)
            raise
        os.close(self._file)
        return False

    def _is_locked(self) -> bool:
        """Return whether the locked file is still the one at the path."""
        try:
            return os.path.samestat(os.fstat(self._file), self._path.stat())
        except FileNotFoundError:
            return False


def _write_durably(path: Path, text: str) -> None:
    """Replace a file's content atomically, and so that it survives a power failure."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
