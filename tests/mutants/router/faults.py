"""Planted faults of the router's core, with the test that catches each: file, and name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvplane.clients.prefix_feed import StoredBlock
from kvplane.router import engine_load, picker
from kvplane.router.engine_load import EngineLoad
from kvplane.router.pool_index import PoolIndex

Fault = Callable[[pytest.MonkeyPatch], None]


def evictions_are_not_heard(patch: pytest.MonkeyPatch) -> None:
    """What was cached once counts as cached for ever."""
    patch.setattr(PoolIndex, "_remove", lambda self, block_hash, tier: None)


def one_tier_stands_for_all(patch: pytest.MonkeyPatch) -> None:
    """A block that left one tier counts as gone from all."""
    original = PoolIndex._store

    def store(self: PoolIndex, block: StoredBlock) -> None:
        original(self, StoredBlock(block.block_hash, block.parent_hash, block.token_ids, 1))

    patch.setattr(PoolIndex, "_store", store)


def parents_do_not_count(patch: pytest.MonkeyPatch) -> None:
    """A block is found wherever its tokens are."""
    original = PoolIndex._store

    def store(self: PoolIndex, block: StoredBlock) -> None:
        original(self, block)
        self._next[bytes(16), block.token_ids.tobytes()] = block.block_hash

    patch.setattr(PoolIndex, "_store", store)


def idle_time_counts(patch: pytest.MonkeyPatch) -> None:
    """A request counts from when the one before it was answered, sent or not."""
    patch.setattr(EngineLoad, "_begun_s", lambda self, first: self._since_s)


def who_gave_up_waits_on(patch: pytest.MonkeyPatch) -> None:
    """A request that ended without an answer stays in the line."""

    def ended(self: EngineLoad, number: int) -> None:
        self.num_open -= 1

    patch.setattr(EngineLoad, "ended", ended)


def the_overdue_stay(patch: pytest.MonkeyPatch) -> None:
    """Requests that are not told of wait until they end."""
    patch.setattr(EngineLoad, "_forget_overdue", lambda self, now_s: None)


def rates_never_change(patch: pytest.MonkeyPatch) -> None:
    """Nothing is learnt."""
    patch.setattr(EngineLoad, "tokens_per_s", property(lambda self: 50.0))


def queues_do_not_count(patch: pytest.MonkeyPatch) -> None:
    """The longest prefix wins, however busy its engine is."""
    patch.setattr(picker.EngineLoad, "wait_s", lambda self, now_s: 0.0)


def the_first_of_equal_ones_wins(patch: pytest.MonkeyPatch) -> None:
    """Open requests do not count, and nobody takes turns."""
    patch.setattr(picker, "min", lambda values, **_: min(list(values)), raising=False)
    patch.setattr(
        picker.Pick, "__lt__", lambda self, other: self.engine < other.engine, raising=False
    )


def old_rates_count_as_new(patch: pytest.MonkeyPatch) -> None:
    """A guess is never forgotten."""
    patch.setattr(engine_load, "_HALF_LIFE_S", 1e9)
    patch.setattr(engine_load, "_GUESS_S", 1e3)


CAUGHT_BY: dict[Fault, tuple[str, str]] = {
    evictions_are_not_heard: (
        "test_pool_index",
        "test_it_finds_what_the_control_plane_finds",
    ),
    one_tier_stands_for_all: (
        "test_pool_index",
        "test_a_block_is_found_until_it_has_left_every_tier",
    ),
    parents_do_not_count: ("test_pool_index", "test_whole_blocks_at_the_beginning_are_found"),
    idle_time_counts: ("test_engine_load", "test_a_rate_is_learnt_from_first_bytes"),
    who_gave_up_waits_on: ("test_engine_load", "test_who_gives_up_waits_no_longer"),
    the_overdue_stay: (
        "test_engine_load",
        "test_a_request_that_is_not_told_of_leaves_the_line_in_its_time",
    ),
    rates_never_change: ("test_engine_load", "test_a_rate_is_learnt_from_first_bytes"),
    old_rates_count_as_new: ("test_engine_load", "test_a_rate_is_learnt_from_first_bytes"),
    queues_do_not_count: ("test_picker", "test_a_hit_is_worth_waiting_for_only_so_long"),
    the_first_of_equal_ones_wins: ("test_picker", "test_equal_engines_share_the_requests"),
}
