"""Planted faults of the router, with the test that catches each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any

import pytest
from starlette.types import Receive

from kvplane.integrations.ray.replica_picker import ReplicaPicker
from kvplane.integrations.router import app, engine_load, picker, proxy
from kvplane.integrations.router.engine_load import EngineLoad
from kvplane.integrations.router.engines import Engines
from kvplane.integrations.router.feeds import PoolFeeds
from kvplane.integrations.router.picker import Picker
from kvplane.integrations.router.pool_index import PoolIndex
from kvplane.prefixes import StoredBlock

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


def what_a_client_left_goes_on(patch: pytest.MonkeyPatch) -> None:
    """An engine computes on for a client that is gone."""

    async def until_gone(receive: Receive, work: Awaitable[Any]) -> Any:
        return await work

    patch.setattr(proxy, "until_gone", until_gone)


def headers_are_an_answer(patch: pytest.MonkeyPatch) -> None:
    """Any failure is told to the client, whether or not it has seen a byte."""
    patch.setattr(proxy, "_TRY_ANOTHER", set())


def those_that_are_down_are_asked(patch: pytest.MonkeyPatch) -> None:
    """An engine that could not be reached counts as up."""
    patch.setattr(Engines, "failed", lambda self, url: None)


def every_key_is_right(patch: pytest.MonkeyPatch) -> None:
    """Keys are not compared."""
    patch.setattr(app, "authenticate", lambda request, keys: None)


def connections_tell_of_each_other(patch: pytest.MonkeyPatch) -> None:
    """Headers of one connection are passed on to another."""
    patch.setattr(proxy, "_HOP_BY_HOP", {b"host", b"content-length"})


CAUGHT_ON_THE_WIRE_BY: dict[Fault, tuple[str, tuple[str, ...]]] = {
    what_a_client_left_goes_on: (
        "test_who_goes_away_takes_the_request_along",
        ("says_no_more",),
    ),
    headers_are_an_answer: (
        "test_another_engine_answers_when_one_fails_before_the_first_byte",
        ("is_full",),
    ),
    those_that_are_down_are_asked: (
        "test_an_engine_that_cannot_be_reached_is_left_alone",
        (),
    ),
    every_key_is_right: ("test_what_cannot_be_routed_is_refused", ()),
    connections_tell_of_each_other: ("test_a_request_and_its_answer_pass_as_they_are", ()),
}


def a_refusal_ends_the_next_try(patch: pytest.MonkeyPatch) -> None:
    """What a replica refused is forgotten where it went instead."""
    original = ReplicaPicker.ended

    def ended(self: ReplicaPicker, request_id: str, replica: str) -> None:
        for other in self.picker.loads:
            original(self, request_id, other)

    patch.setattr(ReplicaPicker, "ended", ended)


def the_chosen_replica_counts(patch: pytest.MonkeyPatch) -> None:
    """A request counts where it was to go, not where it went."""
    original = ReplicaPicker.sent

    def sent(self: ReplicaPicker, request_id: str, replica: str, now_s: float) -> None:
        pick = self._chosen.get(request_id)
        original(self, request_id, pick.engine if pick else replica, now_s)

    patch.setattr(ReplicaPicker, "sent", sent)


def who_gave_up_is_sent(patch: pytest.MonkeyPatch) -> None:
    """A request that nobody waits for is remembered."""
    patch.setattr(ReplicaPicker, "given_up", lambda self, request_id: None)


def all_are_new(patch: pytest.MonkeyPatch) -> None:
    """One replica more, and what is known of the others is forgotten."""
    original = Picker.choose_among

    def choose_among(self: Picker, pool_of: dict[str, str]) -> None:
        self.loads.clear()
        original(self, pool_of)

    patch.setattr(Picker, "choose_among", choose_among)


def pools_are_followed_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Also those whose replicas are gone."""
    original = PoolFeeds.follow
    patch.setattr(
        PoolFeeds, "follow", lambda self, pools: original(self, {*pools, *self.caught_up})
    )


def lost_pools_look_idle(patch: pytest.MonkeyPatch) -> None:
    """An engine that can do nothing has the shortest queue."""
    original = Picker._usable

    def usable(self: Picker, among: Collection[str]) -> list[str]:
        self.lost.clear()
        return original(self, among)

    patch.setattr(Picker, "_usable", usable)


def lost_pools_are_not_picked_at_all(patch: pytest.MonkeyPatch) -> None:
    """Requests fail where they could have waited."""
    original = Picker._usable

    def usable(self: Picker, among: Collection[str]) -> list[str]:
        return [e for e in original(self, among) if self.pool_of[e] not in self.lost]

    patch.setattr(Picker, "_usable", usable)


CAUGHT_BY: dict[Fault, tuple[str, str]] = {
    lost_pools_look_idle: (
        "test_picker",
        "test_engines_of_lost_pools_are_picked_last",
    ),
    lost_pools_are_not_picked_at_all: (
        "test_picker",
        "test_engines_of_lost_pools_are_picked_last",
    ),
    pools_are_followed_for_ever: (
        "test_feeds",
        "test_it_follows_the_pools_that_were_named_last",
    ),
    a_refusal_ends_the_next_try: (
        "test_replica_picker",
        "test_a_request_that_was_refused_counts_where_it_goes_next",
    ),
    the_chosen_replica_counts: (
        "test_replica_picker",
        "test_a_request_counts_where_it_went",
    ),
    who_gave_up_is_sent: (
        "test_replica_picker",
        "test_a_request_that_was_given_up_counts_nowhere",
    ),
    all_are_new: (
        "test_replica_picker",
        "test_replicas_come_and_go_and_those_that_stay_keep_their_load",
    ),
    evictions_are_not_heard: (
        "test_pool_index",
        "test_it_finds_what_the_control_plane_finds",
    ),
    one_tier_stands_for_all: (
        "test_pool_index",
        "test_a_block_is_found_until_it_has_left_every_tier",
    ),
    parents_do_not_count: (
        "test_pool_index",
        "test_whole_blocks_at_the_beginning_are_found",
    ),
    idle_time_counts: ("test_engine_load", "test_a_rate_is_learnt_from_first_bytes"),
    who_gave_up_waits_on: ("test_engine_load", "test_who_gives_up_waits_no_longer"),
    the_overdue_stay: (
        "test_engine_load",
        "test_a_request_that_is_not_told_of_leaves_the_line_in_its_time",
    ),
    rates_never_change: ("test_engine_load", "test_a_rate_is_learnt_from_first_bytes"),
    old_rates_count_as_new: (
        "test_engine_load",
        "test_a_rate_is_learnt_from_first_bytes",
    ),
    queues_do_not_count: (
        "test_picker",
        "test_a_hit_is_worth_waiting_for_only_so_long",
    ),
    the_first_of_equal_ones_wins: (
        "test_picker",
        "test_equal_engines_share_the_requests",
    ),
}
