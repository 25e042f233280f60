"""What growth takes at most."""

from __future__ import annotations

import pytest

from control_plane.sharing.sharing import most_growth
from kvplane import ops
from kvplane.v1 import control_pb2 as cpb


@pytest.mark.parametrize(("num_tokens", "most"), [(1, 2), (40, 12)])
def test_an_append_takes_at_most_two_blocks_and_those_of_its_slots(
    num_tokens: int, most: int
) -> None:
    message = cpb.Append()
    message.CopyFrom(ops.append(1, [5] * num_tokens, num_tokens, first_positions=9).append)
    assert most_growth(message, block_size_tokens=4) == most
