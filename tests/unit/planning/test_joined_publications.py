"""Publications that wait on a registration stream go together, and lose nothing by it."""

from __future__ import annotations

from collections import deque

from control_plane.server.joined_publications import MAX_PUBLICATIONS, take_next
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64


def publish(*indices: int, tenant: str = "tenant", namespace: str = "") -> pb.RegisterResponse:
    publications = tpb.Publications(
        tenant=tenant,
        namespace=namespace,
        hash_algorithm="xxh3-128",
        indices=columns.pack(INT32, indices),
        generations=columns.pack(INT64, [index + 100 for index in indices]),
        parent_indices=columns.pack(INT32, [index - 1 for index in indices]),
        parent_generations=columns.pack(INT64, [index + 200 for index in indices]),
        hashes=b"".join(bytes([index % 256]) * 16 for index in indices),
        token_ids=columns.pack(INT32, [index + i for index in indices for i in range(4)]),
    )
    return pb.RegisterResponse(publish=pb.PublishBlocks(publications=publications))


def fence(ordinal: int) -> pb.RegisterResponse:
    return pb.RegisterResponse(fence=pb.Fence(ordinal=ordinal))


def taken(*messages: pb.RegisterResponse) -> list[pb.RegisterResponse]:
    outbox = deque(messages)
    return [take_next(outbox) for _ in messages if outbox]


def test_publications_that_follow_each_other_are_one_message_in_their_order() -> None:
    assert taken(publish(1, 2), publish(7), publish(3)) == [publish(1, 2, 7, 3)]


def test_every_field_of_publications_is_joined_or_compared() -> None:
    first, second = publish(1), publish(2)
    for message in (first, second):
        message.publish.publications.group = 1
    for field in tpb.Publications.DESCRIPTOR.fields:
        value = getattr(second.publish.publications, field.name)
        if isinstance(value, bytes):
            assert value, f"{field.name} is not tested"
    [joined] = taken(first, second)
    wanted = publish(1, 2)
    wanted.publish.publications.group = 1
    assert joined == wanted


def test_publications_do_not_pass_other_messages() -> None:
    given = [publish(1), publish(2), fence(1), fence(2), publish(3), publish(4)]
    assert taken(*given) == [publish(1, 2), fence(1), fence(2), publish(3, 4)]


def test_publications_of_other_tenants_and_namespaces_stay_apart() -> None:
    given = [publish(1), publish(2, tenant="other"), publish(3, namespace="other"), publish(4)]
    assert taken(*given) == given


def test_no_joined_message_is_larger_than_its_bound() -> None:
    large = publish(*range(MAX_PUBLICATIONS // 2 + 1))
    exact = publish(*range(MAX_PUBLICATIONS // 2 - 1))
    first, second = taken(large, large, exact)
    assert first == large
    num_blocks = columns.count(INT32, second.publish.publications.indices)
    assert num_blocks == MAX_PUBLICATIONS
