"""Joins the publications that wait on one registration stream.

Many engines' steps publish a few blocks each. A message for each of them would cost the server as
much as the answer to the step.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

from google.protobuf.descriptor import FieldDescriptor

from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import columns
from kvplane.wire.columns import INT32

MAX_PUBLICATIONS: Final = 1024  # in a joined message: far below the limit of a message's size
_FIELDS: Final = tpb.Publications.DESCRIPTOR.fields
_COLUMNS: Final = tuple(f.name for f in _FIELDS if f.type == FieldDescriptor.TYPE_BYTES)
_SCOPE: Final = tuple(f.name for f in _FIELDS if f.name not in _COLUMNS)


def take_next(outbox: deque[pb.RegisterResponse]) -> pb.RegisterResponse:
    """Take the next message from the left; publications of one tenant and namespace that follow
    each other become one, in their order. Raises IndexError when there is none.
    """
    message = outbox.popleft()
    if not message.HasField("publish"):
        return message
    joined = message.publish.publications
    if num_more := _num_to_join(joined, outbox):
        parts = [joined, *(outbox.popleft().publish.publications for _ in range(num_more))]
        for name in _COLUMNS:
            setattr(joined, name, b"".join(getattr(part, name) for part in parts))
    return message


def _num_to_join(first: tpb.Publications, outbox: deque[pb.RegisterResponse]) -> int:
    """How many messages at the left of ``outbox`` continue ``first``."""
    scope = _scope_of(first)
    num_messages, num_blocks = 0, columns.count(INT32, first.indices)
    for message in islice(outbox, MAX_PUBLICATIONS):
        publications = message.publish.publications
        num_blocks += columns.count(INT32, publications.indices)
        is_alike = message.HasField("publish") and _scope_of(publications) == scope
        if not is_alike or num_blocks > MAX_PUBLICATIONS:
            break
        num_messages += 1
    return num_messages


def _scope_of(publications: tpb.Publications) -> list[object]:
    return [getattr(publications, name) for name in _SCOPE]
