"""The client's values: tensors, tokens, operations, versions, deadlines, TLS options."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvplane import ops
from kvplane.attention_options import AttentionOptions
from kvplane.block_pattern import BlockPattern
from kvplane.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    PlaneUnavailableError,
    PoolFullError,
    PoolNotReadyError,
)
from kvplane.tensor import Tensor
from kvplane.transport.retry import Deadline, retry_until
from kvplane.transport.tls import Tls, credentials_of
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.v1 import execution_pb2 as data_pb
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.refusals import refused


def test_errors_and_layouts_do_not_bring_grpc_and_nothing_brings_torch_or_numpy() -> None:
    code = """
import sys
import kvplane.errors, kvplane.layout, kvplane.wire.signing
assert "grpc" not in sys.modules
from kvplane import ControlClient, DataClient, layout_from_hf
assert not {"torch", "numpy", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_tensor_comes_back_from_its_message() -> None:
    data = bytes(range(24))
    tensor = Tensor("bfloat16", (2, 2, 3), memoryview(data))
    back = Tensor.from_proto(pb.Tensor.FromString(tensor.to_proto().SerializeToString()))
    assert (back.dtype, back.shape, back.data) == ("bfloat16", (2, 2, 3), data)
    assert Tensor("float32", (0, 4), b"").num_bytes == 0
    assert Tensor.from_proto(Tensor("float8_e5m2", (3, 8), data).to_proto()).data == data


@pytest.mark.parametrize(
    ("field", "dtype", "shape", "num_bytes"),
    [
        ("dtype", "float64", (1,), 8),
        ("shape", "float32", (-1, -1), 4),
        ("shape", "float32", (1,) * 9, 4),
        ("data", "float32", (2, 2), 15),
        ("data", "float16", (2, 2), 16),
        ("data", "float32", (2**40, 2**40), 4),
    ],
)
def test_a_tensor_that_is_wrong_names_the_field(
    field: str, dtype: str, shape: tuple[int, ...], num_bytes: int
) -> None:
    with refused(InvalidRequestError, field):
        Tensor(dtype, shape, bytes(num_bytes))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("key.dtype", pb.Tensor(shape=[1], data=bytes(4))),
        ("key.dtype", pb.Tensor(dtype=99, shape=[1], data=bytes(4))),  # type: ignore[arg-type]
        ("key.shape", pb.Tensor(dtype=pb.ELEMENT_TYPE_FLOAT32, shape=[-1], data=bytes(4))),
        ("key.data", pb.Tensor(dtype=pb.ELEMENT_TYPE_FLOAT32, shape=[2], data=bytes(4))),
        (
            "key.memory",
            pb.Tensor(dtype=pb.ELEMENT_TYPE_FLOAT32, memory=pb.MemoryRange(region_id=1)),
        ),
        (
            "key.memory",
            pb.Tensor(dtype=pb.ELEMENT_TYPE_FLOAT32, shape=[0], memory=pb.MemoryRange()),
        ),
    ],
)
def test_a_tensor_message_that_is_wrong_names_the_field_of_the_request(
    field: str, message: pb.Tensor
) -> None:
    with refused(InvalidRequestError, field):
        Tensor.from_proto(message, field="key")


def test_tokens_travel_as_little_endian_int32() -> None:
    assert ops.pack_tokens([1, 258, 2**31 - 1]) == b"\1\0\0\0\2\1\0\0\xff\xff\xff\x7f"
    assert ops.pack_tokens(b"\1\0\0\0") == b"\1\0\0\0"
    assert list(columns.read(INT32, ops.pack_tokens(array("i", [5, 6])), "")) == [5, 6]


@pytest.mark.parametrize("tokens", [[2**31], [-(2**31) - 1], ["a"], [1.5]])
def test_tokens_that_are_no_int32_are_refused(tokens: list[int]) -> None:
    with refused(InvalidRequestError, "token_ids"):
        ops.pack_tokens(tokens)


def test_to_compute_nothing_yet_is_not_to_compute_all() -> None:
    assert not ops.admit(1, [1]).admit.HasField("num_compute_tokens")
    assert ops.admit(1, [1], num_compute_tokens=0).admit.HasField("num_compute_tokens")


def int32(column: bytes) -> list[int]:
    return columns.read(INT32, column, "").tolist()


def int64(column: bytes) -> list[int]:
    return columns.read(INT64, column, "").tolist()


def test_an_append_of_one_sequence_is_one_element_of_each_column() -> None:
    append = ops.append(3, [7, 8], 1, first_positions=5)
    assert append == ops.append([3], [7, 8], [1], first_positions=[5], num_tokens=[2])
    assert int64(append.append.sequence_ids) == [3]
    assert int32(append.append.first_positions) == [5]
    assert (int32(append.append.num_slots), int32(append.append.num_tokens)) == ([1], [2])
    assert int32(append.append.token_ids) == [7, 8]


def test_a_number_stands_for_each_of_many_sequences() -> None:
    of_one = ops.append([3, 4], [7, 8], 1, first_positions=5, num_tokens=1, num_lookahead_slots=9)
    assert of_one == ops.append(
        [3, 4],
        [7, 8],
        [1, 1],
        first_positions=[5, 5],
        num_tokens=[1, 1],
        num_lookahead_slots=[9, 9],
    )
    assert ops.truncate(range(3, 5), 9) == ops.truncate([3, 4], array("i", [9, 9]))
    assert ops.fork(3, [4, 5]) == ops.fork([3, 3], [4, 5])
    assert ops.deferred_tokens([3, 4], 1, 9, 1, [7, 8]) == ops.deferred_tokens(
        [3, 4], [1, 1], [9, 9], [1, 1], [7, 8]
    )
    assert ops.free(3) == ops.free([3])
    assert ops.swap(3, "host") == ops.swap([3], "host")
    assert ops.swap(3, "device") == ops.swap([3], "device")


def test_tokens_of_several_sequences_need_their_counts() -> None:
    with refused(InvalidRequestError, "num_tokens", match="several sequences"):
        ops.append([3, 4], [7, 8], 1, first_positions=5)
    assert int32(ops.append([3, 4], num_slots=1, first_positions=5).append.num_tokens) == [0, 0]


def test_columns_of_other_lengths_are_left_to_the_control_plane() -> None:
    append = ops.append([3, 4], num_slots=[1], first_positions=[5, 6, 7]).append
    assert (int32(append.num_slots), int32(append.first_positions)) == ([1], [5, 6, 7])


@pytest.mark.parametrize(
    ("field", "build"),
    [
        ("sequence_ids", lambda: ops.append(2**63, first_positions=0)),
        ("first_positions", lambda: ops.append([3, 4], first_positions=2**63)),
        ("num_slots", lambda: ops.append([3, 4], (), 2**31, first_positions=0)),
        ("num_tokens", lambda: ops.append(3, first_positions=0, num_tokens=2**31)),
        (
            "num_lookahead_slots",
            lambda: ops.append(3, first_positions=0, num_lookahead_slots=2**31),
        ),
        ("token_ids", lambda: ops.append(3, [2**31], first_positions=0)),
        ("num_tokens", lambda: ops.truncate([3, 4], 2**63)),
        ("parent_sequence_ids", lambda: ops.fork(-(2**63) - 1, 4)),
        ("fork_sequence_ids", lambda: ops.admit(1, [5], fork_sequence_ids=2**63)),
        ("sequence_ids", lambda: ops.free(2**63)),
        ("admitted_by", lambda: ops.deferred_tokens(3, 1.5, 0, 1, [7])),  # type: ignore[arg-type]
    ],
)
def test_a_number_that_does_not_fit_is_refused_by_its_column(
    field: str, build: Callable[[], Any]
) -> None:
    with refused(InvalidRequestError, field, match="bits"):
        build()


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout_s: float) -> None:
    with refused(InvalidRequestError, "timeout_s"):
        Deadline.after(timeout_s)


async def test_unavailable_is_tried_again_with_growing_delays_until_the_deadline() -> None:
    times: list[float] = []

    async def attempt() -> None:
        times.append(time.monotonic())
        raise PlaneUnavailableError("down")

    begin = time.monotonic()
    with pytest.raises(PlaneUnavailableError):
        await retry_until(Deadline.after(0.5), attempt)
    assert time.monotonic() - begin < 1
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert 2 <= len(gaps) <= 6
    assert gaps[-1] > gaps[0]


async def test_a_peers_own_retry_delay_is_respected() -> None:
    times: list[float] = []

    async def attempt() -> int:
        times.append(time.monotonic())
        if len(times) == 1:
            raise PoolNotReadyError("soon", retry_delay_s=0.2)
        return 7

    assert await retry_until(Deadline.after(5), attempt) == 7
    assert times[1] - times[0] >= 0.2


async def test_other_errors_are_not_tried_again() -> None:
    tries = 0

    async def attempt() -> None:
        nonlocal tries
        tries += 1
        raise PoolFullError("later", retry_delay_s=0.01)

    with pytest.raises(PoolFullError):
        await retry_until(Deadline.after(1), attempt)
    assert tries == 1


async def test_a_deadline_ends_what_it_guards() -> None:
    with pytest.raises(DeadlineExceededError, match=r"within 0\.05 s"):
        async with Deadline.after(0.05).guard():
            await asyncio.sleep(10)


async def test_a_cancelled_body_is_cancelled_and_not_late() -> None:
    async def body() -> None:
        async with Deadline.after(10).guard():
            await asyncio.sleep(10)

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("tls.key_file", Tls(cert_file=Path("cert.pem"))),
        ("tls.cert_file", Tls(key_file=Path("key.pem"))),
        ("tls.ca_file", Tls(ca_file=Path("/nowhere/ca.pem"))),
    ],
)
def test_tls_options_that_do_not_fit_are_named(field: str, options: Tls) -> None:
    with refused(InvalidRequestError, field):
        credentials_of(options)


BAD_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "an infinite scale": ("scale", {"scale": float("inf")}),
    "no number as scale": ("scale", {"scale": float("nan")}),
    "a scale too large for float32": ("scale", {"scale": 1e39}),
    "a negative window": ("sliding_window_tokens", {"sliding_window_tokens": -1}),
    "a huge window": ("sliding_window_tokens", {"sliding_window_tokens": 2**31}),
    "infinite slopes": ("alibi_slopes", {"alibi_slopes": (float("inf"),) * 4}),
    "slopes that are no numbers": ("alibi_slopes", {"alibi_slopes": (float("nan"),) * 4}),
    "slopes too large for float32": ("alibi_slopes", {"alibi_slopes": (-1e39,) * 4}),
    "more slopes than heads can be": ("alibi_slopes", {"alibi_slopes": (0.0,) * (2**20 + 1)}),
    "a negative cap": ("logit_soft_cap", {"logit_soft_cap": -1.0}),
    "an infinite cap": ("logit_soft_cap", {"logit_soft_cap": float("inf")}),
    "no number as cap": ("logit_soft_cap", {"logit_soft_cap": float("nan")}),
    "infinite sinks": ("sinks", {"sinks": (0.0, float("-inf"))}),
    "more sinks than heads can be": ("sinks", {"sinks": (0.0,) * (2**20 + 1)}),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_attention_is_not_asked_for_with(name: str) -> None:
    field, options = BAD_OPTIONS[name]
    with refused(InvalidRequestError, field):
        AttentionOptions(**options)


def test_bad_options_that_travelled_name_their_field() -> None:
    message = data_pb.AttentionOptions(alibi_slopes=[1.0, float("nan")])
    with refused(InvalidRequestError, "layer.options.alibi_slopes"):
        AttentionOptions.from_proto(message, field="layer.options")


def test_options_at_their_limits_come_back_from_their_message() -> None:
    largest = (2 - 2**-23) * 2.0**127
    options = AttentionOptions(-largest, 2**31 - 1, (largest, -0.5, 0.0), largest, (-largest, 0.5))
    assert AttentionOptions.from_proto(options.to_proto(), field="options") == options


def test_a_layer_groups_window_holds_where_the_options_have_none() -> None:
    options = AttentionOptions(scale=0.5, alibi_slopes=(1.0,))
    assert options.in_group(0, None) == options
    windowed = AttentionOptions(0.5, 8, (1.0,))
    assert options.in_group(8, None) == windowed
    assert windowed.in_group(16, None) == windowed


def test_a_layer_groups_pattern_holds_where_the_options_have_none() -> None:
    ours, theirs = BlockPattern(16, 1), BlockPattern(32, 2)
    options = AttentionOptions(block_pattern=ours)
    assert AttentionOptions(0.5).in_group(8, theirs) == AttentionOptions(0.5, 8, (), 0, (), theirs)
    assert options.in_group(0, theirs) is options


SEEN = Tensor("uint8", (2, 3, 2), bytes(range(12)))
MASKED = AttentionOptions(block_pattern=BlockPattern(16, 1), seen_blocks=SEEN)


def test_a_mask_of_blocks_comes_back_from_its_message() -> None:
    assert AttentionOptions.from_proto(MASKED.to_proto(), field="options") == MASKED
    message = MASKED.to_proto()
    message.block_pattern.local_blocks = 0
    with refused(InvalidRequestError, "layer.options.block_pattern.local_blocks"):
        AttentionOptions.from_proto(message, field="layer.options")
    message = MASKED.to_proto()
    message.seen_blocks.memory.region_id = 1
    with refused(InvalidRequestError, "layer.options.seen_blocks.memory"):
        AttentionOptions.from_proto(message, field="layer.options")


def test_a_mask_of_blocks_is_cut_by_heads_and_by_sequences() -> None:
    of_heads = MASKED.of_heads([range(1), range(2, 3)]).seen_blocks
    assert of_heads == Tensor("uint8", (2, 2, 2), bytes([0, 1, 4, 5, 6, 7, 10, 11]))
    of_sequences = MASKED.of_sequences(1, 2).seen_blocks
    assert of_sequences == Tensor("uint8", (1, 3, 2), bytes(range(6, 12)))
    plain = AttentionOptions(0.5)
    assert plain.of_sequences(1, 2) is plain
