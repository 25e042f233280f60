"""The payload version rises with each field that one plane writes for the other.

FIELDS is the history. A new field gets a version of its own there, which becomes
NEWEST_PAYLOAD_VERSION, and the code that writes the field leaves it out where an earlier version is
used (``Session.payload_version``, ``Welcome.payload_version``). To add it to a version that was
released hides it from data planes of that release, which then refuse every plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from kvplane.plane.v1 import plan_pb2
from kvplane.plane.v1 import registration_pb2 as rpb
from kvplane.wire.protocol import NEWEST_PAYLOAD_VERSION, OLDEST_PAYLOAD_VERSION

# What each payload version added: the number and type of each field by message, and the numbers of
# values by enum.
FIELDS: dict[int, dict[str, str]] = {
    1: {
        # Signed.
        "Plan": (
            "1:int32 2:SessionRef 3:string 4:fixed64[] 5:int64 6:int64 7:bool 8:TableChanges "
            "9:Transfers 10:Spans 11:Allocations 12:string 13:int64"
        ),
        "SessionGrant": (
            "1:int32 2:SessionRef 3:int64 4:string 5:fixed64[] 6:string 7:bytes 8:int32 9:string"
        ),
        "Receipt": "1:int32 2:SessionRef 3:string 4:int32 5:fixed64 6:int64 7:bytes",
        "PinGrant": (
            "1:int32 2:SessionRef 3:string 4:fixed64[] "
            "6:uint32[] 7:Tier[] 8:sfixed32[] 9:sfixed64[]"
        ),
        # On registration streams, after Hello and Welcome.
        "RegisterRequest": "1:Hello 2:BlockReport 3:Heartbeat 4:FenceDone 5:FilesForgotten",
        "RegisterResponse": (
            "1:Welcome 2:ReportAccepted 3:PublishBlocks 4:Fence 5:ReportRequest "
            "6:WithdrawBlocks 7:ForgetFiles"
        ),
        # In these.
        "Allocations": "1:Tier[] 2:sfixed32[] 3:sfixed64[] 4:uint32[]",
        "BlockReport": "1:Blocks[] 2:Publications[] 3:bool",
        "Blocks": "1:int32 2:Tier 3:sfixed32[] 4:sfixed64[]",
        "Fence": "1:SessionRef 2:int64",
        "FenceDone": "1:SessionRef",
        "FilesForgotten": "1:int64",
        "ForgetFiles": "1:int64 2:string 3:string 4:sfixed32[] 5:bool 6:bool",
        "Heartbeat": "",
        "Publications": (
            "1:int32 2:string 3:string 4:string 5:sfixed32[] 6:sfixed64[] 7:sfixed32[] "
            "8:sfixed64[] 9:bytes 10:sfixed32[]"
        ),
        "PublishBlocks": "1:Publications",
        "ReportAccepted": "",
        "ReportRequest": "",
        "SessionRef": "1:fixed64 2:int64",
        "Spans": "1:sfixed64[] 2:sfixed32[] 3:sfixed32[]",
        "TableChangeKind": "0 1 2 3 4 5 6 7",
        "TableChanges": (
            "1:TableChangeKind[] 2:sfixed64[] 3:uint32[] 4:Tier[] 5:sfixed32[] 6:sfixed32[] "
            "7:sfixed64[] 8:sfixed32[] 9:sfixed64[] 10:bool[]"
        ),
        "Tier": "0 1 2",
        "Transfers": (
            "1:uint32[] 2:Tier[] 3:sfixed32[] 4:sfixed64[] 5:Tier[] 6:sfixed32[] 7:sfixed64[]"
        ),
        "WithdrawBlocks": "1:sfixed32[] 2:sfixed64[] 3:int32",
    },
    2: {"Plan": "14:bool"},
}
SIGNED = [
    getattr(plan_pb2, name).DESCRIPTOR for name in ("Plan", "SessionGrant", "Receipt", "PinGrant")
]
STREAM = [rpb.RegisterRequest.DESCRIPTOR, rpb.RegisterResponse.DESCRIPTOR]
COLUMNS = [plan_pb2.TableChangeKind.DESCRIPTOR]
SCALARS = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}
# Said before a version is agreed on: readers ignore what they do not know.
FIRST = {"Hello", "Welcome"}


def declared(roots: Iterable[Descriptor | EnumDescriptor]) -> dict[str, set[str]]:
    """Fields of these messages and of all that they hold, by the name of the message or enum."""
    found: dict[str, set[str]] = {}
    pending: list[Descriptor | EnumDescriptor] = [*roots]
    while pending:
        what = pending.pop()
        if what.name in found or what.name in FIRST:
            continue
        if isinstance(what, EnumDescriptor):
            found[what.name] = {str(value.number) for value in what.values}
            continue
        found[what.name] = {f"{field.number}:{type_of(field)}" for field in what.fields}
        pending += (field.message_type for field in what.fields if field.message_type)
        pending += (field.enum_type for field in what.fields if field.enum_type)
    return found


def type_of(field: FieldDescriptor) -> str:
    """Return a field's type as the proto names it, with [] if it is repeated."""
    holds = field.message_type or field.enum_type
    return (holds.name if holds else SCALARS[field.type]) + "[]" * field.is_repeated


def listed(history: Mapping[int, Mapping[str, str]]) -> dict[str, set[str]]:
    """All fields of a history, by the name of the message or enum."""
    found: dict[str, set[str]] = {}
    for added in history.values():
        for name, fields in added.items():
            found.setdefault(name, set()).update(fields.split())
    return found


def test_each_field_between_planes_is_listed_with_its_payload_version() -> None:
    assert listed(FIELDS) == declared([*SIGNED, *STREAM, *COLUMNS])


def test_the_last_version_listed_is_the_newest_and_the_oldest_is_known() -> None:
    assert [*FIELDS] == [*range(1, NEWEST_PAYLOAD_VERSION + 1)]
    assert OLDEST_PAYLOAD_VERSION in FIELDS
    assert all(FIELDS.values()), "a version that adds nothing"
