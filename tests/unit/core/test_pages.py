"""Pages of lists: what is there all the while is in one page, whatever comes and goes."""

from __future__ import annotations

from base64 import urlsafe_b64encode

import pytest

from control_plane.queries import MAX_PAGE_SIZE, page_of
from kvplane.errors import InvalidRequestError
from kvplane.wire.v1.pool_pb2 import ListPoolsRequest
from tests.helpers.refusals import refused


def page(
    ids: list[int], token: str = "", size: int = 2, of: str = "things"
) -> tuple[list[int], str]:
    request = ListPoolsRequest(page_size=size, page_token=token)
    shown, next_token = page_of(ids, request, of=of, parse=int)
    return list(shown), next_token


def test_pages_follow_each_other_to_the_end() -> None:
    assert page([]) == ([], "")
    assert page([1, 2]) == ([1, 2], "")
    first, token = page([1, 2, 3])
    assert (first, page([1, 2, 3], token)) == ([1, 2], ([3], ""))


def test_ids_that_come_and_go_move_no_other_one() -> None:
    first, token = page([10, 20, 30, 40])
    second, token = page([5, 10, 25, 30, 40], token)  # 20, the last one shown, has gone
    third, token = page([25, 30, 40, 50], token)
    assert (first, second, third, token) == ([10, 20], [25, 30], [40, 50], "")


def test_a_page_that_names_no_size_has_the_most() -> None:
    ids = [*range(2 * MAX_PAGE_SIZE)]
    shown, token = page(ids, size=0)
    assert shown == ids[:MAX_PAGE_SIZE]
    assert page(ids, token, size=MAX_PAGE_SIZE) == (ids[MAX_PAGE_SIZE:], "")


@pytest.mark.parametrize("size", [-1, MAX_PAGE_SIZE + 1, -(2**31), 2**31 - 1])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with refused(InvalidRequestError, "page_size"):
        page([1], size=size)


@pytest.mark.parametrize(
    "token",
    [
        "5",
        "dGhpbmdz",
        "dGhpbmdzLzU",  # without its padding
        "dGhpbmdz/zU=",
        "ü",
        "////",
        urlsafe_b64encode(b"things/").decode(),
        urlsafe_b64encode(b"things/five").decode(),
        urlsafe_b64encode(b"things/" + b"9" * 5000).decode(),
        urlsafe_b64encode(b"\xff\xff").decode(),
        page([1, 2, 3], of="other things")[1],
        page([1, 2, 3], of="things/2")[1],
    ],
)
def test_a_token_of_another_list_or_of_none_is_refused(token: str) -> None:
    assert page([4, 5, 6], urlsafe_b64encode(b"things/5").decode()) == ([6], "")
    with refused(InvalidRequestError, "page_token"):
        page([1, 2, 3], token)
