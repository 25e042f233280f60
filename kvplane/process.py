"""Notices forks: a forked process has none of the threads of gRPC, nor those of event loops."""

from __future__ import annotations

import os
from typing import Final

from kvplane.errors import InvalidRequestError

_USERS: Final[list[int]] = []
"""The id of the process that used gRPC first: this one, or one that it was forked from."""


def check_process() -> None:
    """Note that this process uses gRPC from now on. Raises InvalidRequestError in a process that
    was forked from one that does, where every call would wait for ever.
    """
    process_id = os.getpid()
    if not _USERS:
        _USERS.append(process_id)
    elif _USERS[0] != process_id:
        raise InvalidRequestError(
            "was forked from one that uses kvplane, whose threads it has not: start processes by "
            "spawn, or fork them before the first client or cache",
            field="process",
        )
