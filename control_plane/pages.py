"""Pages of a list of ids: each begins after the last id of the page before, so what comes or goes
between two pages moves nothing else from one to another.
"""

from __future__ import annotations

from base64 import b64decode, urlsafe_b64encode
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from kvplane.errors import InvalidRequestError

MAX_PAGE_SIZE: Final = 1000

Id = TypeVar("Id", int, str)


class PageRequest(Protocol):
    """A request for one page of a list: its ``page_size`` and ``page_token``."""

    page_size: int
    page_token: str


def page_of(
    ids: Sequence[Id], request: PageRequest, *, of: str, parse: Callable[[str], Id]
) -> tuple[Sequence[Id], str]:
    """Return one page of ``ids``, which ascend, and the token of the next page, empty if there is
    none. ``of`` names the list: the token of another list is refused. ``parse`` reads an id, and
    raises ValueError. Raises InvalidRequestError for page_size and page_token.
    """
    if not 0 <= request.page_size <= MAX_PAGE_SIZE:
        raise InvalidRequestError(f"must be from 0 to {MAX_PAGE_SIZE}", field="page_size")
    begin, prefix = 0, f"{of}/"
    if request.page_token:
        try:
            token = b64decode(request.page_token, b"-_", validate=True).decode()
            if not token.startswith(prefix):
                raise ValueError(of)
            begin = bisect_right(ids, parse(token.removeprefix(prefix)))
        except ValueError as error:
            raise InvalidRequestError(
                "must be the next_page_token of an answer for the same list", field="page_token"
            ) from error
    end = begin + (request.page_size or MAX_PAGE_SIZE)
    if end >= len(ids):
        return ids[begin:], ""
    return ids[begin:end], urlsafe_b64encode(f"{prefix}{ids[end - 1]}".encode()).decode()
