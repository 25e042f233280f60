"""The tree of errors and its one table."""

from __future__ import annotations

import re

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvplane import errors
from kvplane.errors import CODES, REASONS, ConflictError, KvplaneError, StaleError
from kvplane.wire.error_codec import (
    DOMAIN,
    from_rpc_error,
    from_wire,
    to_rich_status,
    to_wire,
)
from kvplane.wire.v1 import types_pb2 as pb


def every_class() -> list[type[KvplaneError]]:
    found, todo = [], [KvplaneError]
    while todo:
        cls = todo.pop()
        found.append(cls)
        todo.extend(cls.__subclasses__())
    return [cls for cls in found if cls.__module__ == errors.__name__]


# Other modules may tell kinds of one error apart.
LEAVES = [cls for cls in every_class() if not {*cls.__subclasses__()} & {*every_class()}]


def test_every_leaf_has_a_row_in_the_table_and_nothing_else_has() -> None:
    assert set(CODES) == set(LEAVES)


@pytest.mark.parametrize("cls", LEAVES)
def test_a_row_names_a_grpc_status_and_a_reason_of_at_most_63_characters(
    cls: type[KvplaneError],
) -> None:
    assert CODES[cls] in grpc.StatusCode.__members__
    assert CODES[cls] not in ("OK", "UNKNOWN")
    reason = cls("text").reason
    assert len(reason) <= 63
    assert re.fullmatch(r"[A-Z][A-Z0-9_]+[A-Z0-9]", reason)
    assert REASONS[reason] is cls


def test_no_two_errors_share_a_reason() -> None:
    assert len(REASONS) == len(CODES)


def test_the_tree_in_the_docstring_is_the_tree_with_its_codes() -> None:
    drawn: dict[str, tuple[str, str]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│├└─ ]*)(\w+Error)\b\s*([A-Z_]+\b)?", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        above[depth:] = [match[2]]
        code = match[3] if match[3] in grpc.StatusCode.__members__ else ""
        drawn[match[2]] = (above[depth - 1] if depth else "Exception", code)
    real = {cls.__name__: (cls.__bases__[0].__name__, CODES.get(cls, "")) for cls in every_class()}
    assert drawn == real


@pytest.mark.parametrize("cls", LEAVES)
def test_what_is_raised_comes_back_from_the_message_that_streams_carry(
    cls: type[KvplaneError],
) -> None:
    sent = cls("what happened", field="operations[2].admit", retry_delay_s=1.25)
    sent.next_number = 2**53
    got = from_wire(pb.Error.FromString(to_wire(sent).SerializeToString()))
    assert type(got) is cls
    assert (got.message, got.field, got.retry_delay_s) == (sent.message, sent.field, 1.25)
    assert got.next_number == 2**53


def test_an_error_without_a_retry_delay_comes_back_without_one() -> None:
    assert from_wire(to_wire(errors.SequenceBusyError("busy"))).retry_delay_s is None


def test_a_reason_of_a_later_release_falls_back_on_its_code() -> None:
    for code, cls in (("FAILED_PRECONDITION", ConflictError), ("ABORTED", StaleError)):
        number = grpc.StatusCode[code].value[0]
        known = from_wire(pb.Error(code=number, reason="SOMETHING_NEW", message="m"))
        assert type(known) is cls
    unknown = from_wire(pb.Error(code=4711, reason="SOMETHING_NEW", message="m"))
    assert type(unknown) is errors.InternalError


def test_a_base_class_that_is_raised_by_mistake_is_internal() -> None:
    assert to_wire(errors.CapacityError("which?")).code == grpc.StatusCode.INTERNAL.value[0]


def test_a_malformed_request_says_so_in_the_form_that_other_clients_know() -> None:
    status = to_rich_status(errors.InvalidRequestError("is negative", field="number"))
    names = [detail.TypeName() for detail in status.details]
    assert names == ["google.rpc.ErrorInfo", "google.rpc.BadRequest"]
    assert DOMAIN.encode() in status.details[0].value
    assert b"number" in status.details[1].value


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), ("9" * 18, 10**18 - 1), ("", 0), ("-1", 0), ("1" * 19, 0)]
)
def test_a_next_number_in_a_status_is_read_if_it_is_one(text: str, number: int) -> None:
    error = errors.SequenceBusyError("busy")
    error.next_number = 4
    status = to_rich_status(error)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert dict(info.metadata) == {"next_number": "4"}
    info.metadata["next_number"] = text
    status.details[0].Pack(info)
    sent = rpc_status.to_status(status)
    call = grpc.aio.AioRpcError(
        sent.code,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(*sent.trailing_metadata),
        details=sent.details,
    )
    assert from_rpc_error(call).next_number == number


def test_a_long_message_still_fits_into_the_trailers() -> None:
    status = to_rich_status(errors.InvalidRequestError("m" * 100_000, field="f" * 100_000))
    assert status.ByteSize() < 8192 / 2
