"""The operating system's calls on files, in one place, so that tests can make them fail."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_PRIVATE = 0o600


class Disk:
    """File operations of the system. Every method raises OSError."""

    def create(self, path: Path) -> int:
        """Create a file that only this user can read. Returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _PRIVATE)

    def write(self, fd: int, data: bytes) -> None:
        """Write all of ``data``."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]

    def sync(self, fd: int) -> None:
        """Flush a file to the disk; returns when its data would survive a loss of power."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a file descriptor."""
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically: at any time ``new`` is the whole file or does not exist."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        path.unlink()

    def read(self, path: Path, most_bytes: int) -> memoryview:
        """Read at most ``most_bytes`` from a file's beginning, into writable memory."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            content = memoryview(bytearray(min(most_bytes, os.fstat(fd).st_size)))
            end = 0
            while end < len(content) and (num := os.readv(fd, [content[end:]])):
                end += num
            return content[:end]
        finally:
            os.close(fd)

    def touch(self, path: Path) -> None:
        """Set a file's modification time to now."""
        os.utime(path, follow_symlinks=False)

    def lock(self, path: Path) -> int:
        """Lock a file until its descriptor is closed or the process ends. Returns the descriptor.
        Raises BlockingIOError while another process holds the lock.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _PRIVATE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd
