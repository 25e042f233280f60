"""The payload version rises with each field that one plane writes for the other.

FIELDS is the history. A new field gets a version of its own there, which becomes
NEWEST_PAYLOAD_VERSION, and the code that writes the field leaves it out where an earlier version is
used (``Session.payload_version``, ``Welcome.payload_version``). To add it to a version that was
released hides it from data planes of that release, which then refuse every plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf.descriptor import Descriptor, EnumDescriptor

from kvplane.plane.v1 import plan_pb2
from kvplane.plane.v1 import registration_pb2 as rpb
from kvplane.wire.protocol import NEWEST_PAYLOAD_VERSION, OLDEST_PAYLOAD_VERSION

# What each payload version added: numbers of fields by message, and of values by enum.
FIELDS: dict[int, dict[str, Iterable[int]]] = {
    1: {
        # Signed.
        "Plan": range(1, 14),
        "SessionGrant": range(1, 10),
        "Receipt": range(1, 8),
        # On registration streams, after Hello and Welcome.
        "RegisterRequest": range(1, 6),
        "RegisterResponse": range(1, 8),
        # In these.
        "Allocations": range(1, 5),
        "BlockReport": range(1, 4),
        "Blocks": range(1, 5),
        "Fence": range(1, 3),
        "FenceDone": (1,),
        "FilesForgotten": (1,),
        "ForgetFiles": range(1, 7),
        "Heartbeat": (),
        "Publications": range(1, 11),
        "PublishBlocks": (1,),
        "ReportAccepted": (),
        "ReportRequest": (),
        "SessionRef": range(1, 3),
        "Spans": range(1, 4),
        "TableChangeKind": range(8),
        "TableChanges": range(1, 11),
        "Tier": range(3),
        "Transfers": range(1, 8),
        "WithdrawBlocks": range(1, 4),
    },
}
SIGNED = [getattr(plan_pb2, name).DESCRIPTOR for name in ("Plan", "SessionGrant", "Receipt")]
STREAM = [rpb.RegisterRequest.DESCRIPTOR, rpb.RegisterResponse.DESCRIPTOR]
COLUMNS = [plan_pb2.TableChangeKind.DESCRIPTOR]
# Said before a version is agreed on: readers ignore what they do not know.
FIRST = {"Hello", "Welcome"}


def declared(roots: Iterable[Descriptor | EnumDescriptor]) -> dict[str, set[int]]:
    """Numbers in these messages and in all that they hold, by the name of the message or enum."""
    found: dict[str, set[int]] = {}
    pending: list[Descriptor | EnumDescriptor] = [*roots]
    while pending:
        what = pending.pop()
        if what.name in found or what.name in FIRST:
            continue
        if isinstance(what, EnumDescriptor):
            found[what.name] = {value.number for value in what.values}
            continue
        found[what.name] = {field.number for field in what.fields}
        pending += (field.message_type for field in what.fields if field.message_type)
        pending += (field.enum_type for field in what.fields if field.enum_type)
    return found


def listed(history: Mapping[int, Mapping[str, Iterable[int]]]) -> dict[str, set[int]]:
    """All numbers of a history, by the name of the message or enum."""
    found: dict[str, set[int]] = {}
    for added in history.values():
        for name, numbers in added.items():
            found.setdefault(name, set()).update(numbers)
    return found


def test_each_field_between_planes_is_listed_with_its_payload_version() -> None:
    assert listed(FIELDS) == declared([*SIGNED, *STREAM, *COLUMNS])


def test_the_last_version_listed_is_the_newest_and_the_oldest_is_known() -> None:
    assert [*FIELDS] == [*range(1, NEWEST_PAYLOAD_VERSION + 1)]
    assert OLDEST_PAYLOAD_VERSION in FIELDS
    assert all(FIELDS.values()), "a version that adds nothing"
