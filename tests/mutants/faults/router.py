"""Faults of the router, and of its choice among the replicas of Ray Serve."""

from __future__ import annotations

from tests.mutants.fault import Fault, first

INDEX, LOAD, PICKER, FEEDS, ENGINES, PROXY, APP = (
    f"integrations/router/{name}.py"
    for name in ("pool_index", "engine_load", "picker", "feeds", "engines", "proxy", "app")
)
REPLICAS = "integrations/ray/replica_picker.py"
OF_INDEX, OF_LOAD, OF_PICKER, OF_FEEDS, OF_PROXY = (
    f"integrations/router/tests/test_{name}.py"
    for name in ("pool_index", "engine_load", "picker", "feeds", "router_proxy")
)
OF_REPLICAS = "integrations/ray/tests/test_replica_picker.py"

FAULTS = (
    Fault(  # A guess is never forgotten.
        "old_rates_count_as_new",
        LOAD,
        "_HALF_LIFE_S: Final = 20.0",
        "_HALF_LIFE_S: Final = 1e9",
        f"{OF_LOAD}::test_a_rate_is_learnt_from_first_bytes",
        also=((LOAD, "_GUESS_S: Final = 1.0", "_GUESS_S: Final = 1e3"),),
    ),
    *(
        Fault(name, file, old, new, tests, timeout_s=20)
        for name, file, old, new, tests in (
            (  # What was cached once counts as cached for ever.
                "evictions_are_not_heard",
                INDEX,
                *first("    def _remove(self, block_hash: bytes, tier: int) -> None:", "return"),
                f"{OF_INDEX}::test_it_finds_what_the_control_plane_finds",
            ),
            (  # A block that left one tier counts as gone from all.
                "one_tier_stands_for_all",
                INDEX,
                "tiers.add(block.tier)",
                "tiers.add(1)",
                f"{OF_INDEX}::test_a_block_is_found_until_it_has_left_every_tier",
            ),
            (  # A block is found wherever its tokens are.
                "parents_do_not_count",
                INDEX,
                "        self._next[link] = block.block_hash\n",
                "        self._next[link] = block.block_hash\n"
                "        self._next[bytes(16), link[1]] = block.block_hash\n",
                f"{OF_INDEX}::test_whole_blocks_at_the_beginning_are_found",
            ),
            (  # A request counts from when the one before it was answered, sent or not.
                "idle_time_counts",
                LOAD,
                "return max(first.sent_s, self._since_s)",
                "return self._since_s",
                f"{OF_LOAD}::test_a_rate_is_learnt_from_first_bytes",
            ),
            (
                "who_gave_up_waits_on",
                LOAD,
                "        self.num_open -= 1\n        if number in self._waiting:",
                "        self.num_open -= 1\n        if False:",
                f"{OF_LOAD}::test_who_gives_up_waits_no_longer",
            ),
            (  # Requests that are not told of wait until they end.
                "the_overdue_stay",
                LOAD,
                *first("    def _forget_overdue(self, now_s: float) -> None:", "return"),
                f"{OF_LOAD}::test_a_request_that_is_not_told_of_leaves_the_line_in_its_time",
            ),
            (  # Nothing is learnt.
                "rates_never_change",
                LOAD,
                "return self._tokens / self._seconds",
                "return 50.0",
                f"{OF_LOAD}::test_a_rate_is_learnt_from_first_bytes",
            ),
            (  # The longest prefix wins, however busy its engine is.
                "queues_do_not_count",
                LOAD,
                *first("    def wait_s(self, now_s: float) -> float:", "return 0.0"),
                f"{OF_PICKER}::test_a_hit_is_worth_waiting_for_only_so_long",
            ),
            (  # Open requests do not count, and nobody takes turns.
                "the_first_of_equal_ones_wins",
                PICKER,
                "(self.loads[pick.engine].num_open, self._last_turn[pick.engine]),",
                "pick.engine,",
                f"{OF_PICKER}::test_equal_engines_share_the_requests",
            ),
            (  # An engine that can do nothing has the shortest queue.
                "lost_pools_look_idle",
                PICKER,
                "return usable or engines",
                "return engines",
                f"{OF_PICKER}::test_engines_of_lost_pools_are_picked_last",
            ),
            (  # Requests fail where they could have waited.
                "lost_pools_are_not_picked_at_all",
                PICKER,
                "return usable or engines",
                "return usable",
                f"{OF_PICKER}::test_engines_of_lost_pools_are_picked_last",
            ),
            (  # Also those whose replicas are gone.
                "pools_are_followed_for_ever",
                FEEDS,
                "wanted = set(pools)",
                "wanted = set(pools) | self._tasks.keys()",
                f"{OF_FEEDS}::test_it_follows_the_pools_that_were_named_last",
            ),
            (  # What a replica refused is forgotten where it went instead.
                "a_refusal_ends_the_next_try",
                REPLICAS,
                "        if (booked := self._sent.pop((request_id, replica), None)) is not None:\n",
                "        for key in [key for key in self._sent if key[0] == request_id]:\n"
                "            booked = self._sent.pop(key)\n",
                f"{OF_REPLICAS}::test_a_request_that_was_refused_counts_where_it_goes_next",
            ),
            (  # A request counts where it was to go, not where it went.
                "the_chosen_replica_counts",
                REPLICAS,
                "        if replica != pick.engine:  #",
                "        replica = pick.engine\n        if replica != pick.engine:  #",
                f"{OF_REPLICAS}::test_a_request_counts_where_it_went",
            ),
            (  # A request that nobody waits for is remembered.
                "who_gave_up_is_sent",
                REPLICAS,
                "        self._chosen.pop(request_id, None)\n",
                "        pass\n",
                f"{OF_REPLICAS}::test_a_request_that_was_given_up_counts_nowhere",
            ),
            (  # One replica more, and what is known of the others is forgotten.
                "all_are_new",
                PICKER,
                "engine: self.loads.get(engine) or EngineLoad(",
                "engine: EngineLoad(",
                f"{OF_REPLICAS}::test_replicas_come_and_go_and_those_that_stay_keep_their_load",
            ),
            (  # An engine computes on for a client that is gone.
                "what_a_client_left_goes_on",
                PROXY,
                "await until_gone(receive, self._send_all(send))",
                "await self._send_all(send)",
                f"{OF_PROXY}::test_who_goes_away_takes_the_request_along",
            ),
            (  # Any failure is told to the client, whether or not it has seen a byte.
                "headers_are_an_answer",
                PROXY,
                "_TRY_ANOTHER: Final = {429, 502, 503, 504}",
                "_TRY_ANOTHER: Final = set[int]()",
                f"{OF_PROXY}::test_another_engine_answers_when_one_fails_before_the_first_byte",
            ),
            (  # An engine that could not be reached counts as up.
                "those_that_are_down_are_asked",
                ENGINES,
                *first("    def failed(self, url: str) -> None:", "return"),
                f"{OF_PROXY}::test_an_engine_that_cannot_be_reached_is_left_alone",
            ),
            (
                "every_key_is_right",
                APP,
                "            client = authenticate(http, self._api_keys)\n",
                '            client = ""\n',
                f"{OF_PROXY}::test_what_cannot_be_routed_is_refused",
            ),
            (  # Headers of one connection are passed on to another.
                "connections_tell_of_each_other",
                PROXY,
                "if name not in _HOP_BY_HOP | named]",
                'if name not in (b"host", b"content-length")]',
                f"{OF_PROXY}::test_a_request_and_its_answer_pass_as_they_are",
            ),
        )
    ),
)
