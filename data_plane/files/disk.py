"""The calls of the operating system that files need, in one place, so that tests can fail them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_PRIVATE = 0o600


class Disk:
    """Every method raises OSError."""

    def create(self, path: Path) -> int:
        """A new file that only this user can read; its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _PRIVATE)

    def write(self, fd: int, data: bytes) -> None:
        """All of ``data``."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]

    def sync(self, fd: int) -> None:
        """Return when what was written would outlive a loss of power."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """End the use of a descriptor."""
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """``new`` is the whole file or is not there, whenever one looks."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        path.unlink()

    def read(self, path: Path, most_bytes: int) -> memoryview:
        """What a file begins with, in memory that can be written."""
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
        """Set the time at which it was last changed to now."""
        os.utime(path, follow_symlinks=False)

    def lock(self, path: Path) -> int:
        """Lock a file until its descriptor is closed or the process ends. Raises BlockingIOError
        while another process has it.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _PRIVATE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd
