"""Encodings that end with many bytes are those that every protobuf library reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplane.v1 import execution_pb2 as contract
from kvplane.wire import bulk
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb

FIELDS = (6, 1, 3)  # read, blocks, data
DATA = st.lists(st.binary(max_size=300), max_size=4)


def levels_of(fingerprint: bytes, shape: list[int]) -> list[tuple[bytes, int]]:
    answer = pb.ReadBlocksResponse(layout_fingerprint=fingerprint, num_bytes=b"1234" * len(shape))
    tensor = tpb.Tensor(dtype=tpb.ELEMENT_TYPE_UINT8, shape=shape)
    return [(b"", 6), (answer.SerializeToString(), 1), (tensor.SerializeToString(), 3)]


@given(DATA, st.binary(max_size=200), st.lists(st.integers(0, 2**40), max_size=20))
def test_every_reader_of_the_contract_reads_what_was_encoded(
    data: list[bytes], fingerprint: bytes, shape: list[int]
) -> None:
    levels = levels_of(fingerprint, shape)
    encoded = bulk.encode(levels, data)
    (read := contract.ExecuteResponse()).ParseFromString(encoded)
    assert read.read.blocks.data == b"".join(data)
    assert read.read.layout_fingerprint == fingerprint and [*read.read.blocks.shape] == shape
    found = bulk.decode(encoded, FIELDS)
    assert found is not None
    assert (found[0], bytes(found[1])) == ([others for others, _ in levels], b"".join(data))


def test_other_encodings_are_left_to_protobuf() -> None:
    answer = pb.ReadBlocksResponse(layout_fingerprint=b"print")
    answer.blocks.data = b"data"
    for message, fields in (
        (pb.ExecuteResponse(read=answer), FIELDS),  # the fingerprint comes after the blocks
        (tpb.Tensor(data=b"data"), (4,)),
        (tpb.SessionRef(session_id=1), (1,)),  # a number
        (tpb.Error(code=3), (3,)),
    ):
        assert bulk.decode(message.SerializeToString(), fields) is None


@given(st.integers(0, 400), st.binary(max_size=20))
def test_encodings_that_were_cut_off_or_are_none_are_left_to_protobuf(
    length: int, others: bytes
) -> None:
    encoded = bulk.encode(levels_of(b"print", [1, 2]), [b"data" * 80])
    cut = encoded[: min(length, len(encoded) - 1)]
    assert bulk.decode(cut, FIELDS) is None
    bulk.decode(others, FIELDS)
    assert bulk.decode(b"\xff" * 1000, FIELDS) is None
