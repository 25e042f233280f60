"""The tests of the control plane's operations over a socket fail when a step is taken out of a copy
of the tree.
"""

from __future__ import annotations

from tests.mutants.fault import Fault

SHARING = "control_plane/sessions/pool_admission.py"
PREFIXES = "control_plane/prefixes.py"
YIELDING = "tests/unit/core/test_sharing.py"
VICTIMS = "tests/unit/admission/test_admission_victims.py"
PUSHED = "tests/rpc/operations/test_waiting.py"
RETENTIONS = "tests/rpc/operations/test_retained_and_forgotten.py"
NAMESPACES = "tests/rpc/operations/test_kept_apart.py"
WATCH = "tests/rpc/operations/test_index_feed.py"
FORGERIES = "tests/attacks/test_forgeries.py"
QUESTIONS = "tests/rpc/operations/test_cached_prefixes.py"
TOLD = "tests/rpc/test_told_streams.py"
SEARCHES = "tests/unit/core/test_prefixes.py"
SHARERS = "tests/unit/core/test_step_costs.py"

FAULTS = (
    Fault(
        "what_was_written_goes_with_who_is_cut",
        SHARING,
        "            native.cut(handle, sequence_id)\n",
        "            native.cut(handle, sequence_id)\n"
        "            native.forget_roots([session.root], True)\n",
        YIELDING,
    ),
    Fault(
        "every_stream_is_looked_at",
        "control_plane/server/registration_server.py",
        "        for key in self._core.take_notified():\n",
        "        self._core.take_notified()\n        for key in [*self._streams]:\n",
        TOLD,
    ),
    Fault(
        "who_has_to_yield_is_not_told",
        SHARING,
        "                self.news.asked(\n                    session,\n",
        "                print(\n                    session,\n",
        YIELDING,
    ),
    Fault(
        "news_are_not_pushed",
        "control_plane/server/service.py",
        "stream = self._step_streams.get(session_id)\n            if stream is not None:",
        "stream = None\n            if stream is not None:",
        PUSHED,
        "pushed",
    ),
    Fault(
        "who_was_cut_is_unknown",
        "control_plane/steps/failures.py",
        "case _native.NOT_FOUND if a in session.revoked",
        "case _native.NOT_FOUND if False",
        YIELDING,
        "does_nothing",
    ),
    Fault(
        "growth_cuts_nobody",
        "control_plane/admission/victims.py",
        "        (num_for_growth, _juniors(turns, blocked)),\n",
        "",
        VICTIMS,
        "growth",
    ),
    Fault(
        "turns_do_not_end",
        "control_plane/admission/victims.py",
        "is_past = ends_s < now_s",
        "is_past = False",
        VICTIMS,
        "turn_ends",
    ),
    Fault(
        "who_frees_enough_is_cut_all_the_same",
        "control_plane/admission/victims.py",
        "            if num_found >= num_lacking:\n                break\n",
        "",
        VICTIMS,
        "only_as_many",
    ),
    Fault(
        "a_refused_retention_is_done_in_part",
        PREFIXES,
        "    if len(done) == 5:\n        _, _, most",
        "    if len(done) == 5:\n        pool.native.retain(\n"
        "            root,\n"
        "            owner,\n"
        "            token_ids[: 8 * pool.block_size],\n"
        "            request.priority,\n"
        "            pool.now_s + time_to_live_s,\n"
        "            pool.num_retainable_blocks(),\n        )\n        _, _, most",
        RETENTIONS,
        "refused_leaves",
    ),
    Fault(
        "a_retention_is_checked_too_late",
        PREFIXES,
        "    if not ends and not 1 <= request.priority <= MAX_PRIORITY:\n",
        "    root, owner = root_of(pool.layout.fingerprint, tenant, ''), pool.owner(tenant)\n"
        "    priority = min(request.priority + 1, 100)\n"
        "    pool.native.retain(root, owner, token_ids, priority, pool.now_s + 99, 10**6)\n"
        "    if not ends and not 1 <= request.priority <= MAX_PRIORITY:\n",
        RETENTIONS,
        "wrong_request",
    ),
    Fault(
        "a_retention_ignores_the_namespace",
        PREFIXES,
        "    root, owner = root_of(pool.layout.fingerprint, tenant, request.namespace)",
        '    root, owner = root_of(pool.layout.fingerprint, tenant, "")',
        NAMESPACES,
        "retention",
    ),
    Fault(
        "forgetting_ignores_the_namespace",
        PREFIXES,
        "    root = root_of(pool.layout.fingerprint, tenant, request.namespace)\n    if scope",
        '    root = root_of(pool.layout.fingerprint, tenant, "")\n    if scope',
        NAMESPACES,
        "forgotten",
    ),
    Fault(
        "a_tenant_forgets_what_others_have",
        PREFIXES,
        "[each for each in pool.roots() if owner_of(each)[0] == tenant]",
        "pool.roots()",
        FORGERIES,
        "another_tenants_prefix",
    ),
    Fault(
        "what_sequences_read_is_forgotten_without_force",
        PREFIXES,
        "native.forget_roots(roots, request.force)",
        "native.forget_roots(roots, True)",
        RETENTIONS,
        "only_by_force",
    ),
    Fault(
        "blocks_are_forgotten_before_they_are_reported",
        PREFIXES,
        "would not be forgotten.\n    pool.require_built()\n",
        "would not be forgotten.\n",
        SEARCHES,
        "before_all_shards",
    ),
    Fault(
        "hashes_beside_tokens_are_ignored",
        PREFIXES,
        "    if hashes and token_ids:\n",
        "    if False:\n",
        QUESTIONS,
        "wrong",
    ),
    Fault(
        "a_search_holds_up_everybody",
        PREFIXES,
        "        if num_visited >= _SLICE_BLOCKS:\n",
        "        if num_visited < 0:\n",
        SEARCHES,
        "in_slices",
    ),
    Fault(
        "a_snapshot_is_complete_with_its_first_part",
        "control_plane/watching.py",
        "revision=0 if self._in_snapshot else self._revision",
        "revision=self._revision",
        "tests/unit/core/test_followers.py",
    ),
    Fault(
        "namespaces_are_not_kept_apart",
        "control_plane/sessions/sessions.py",
        "root = root_of(pool.layout.fingerprint, tenant, request.namespace)",
        'root = root_of(pool.layout.fingerprint, tenant, "")',
        NAMESPACES,
        "weights or adapter",
    ),
    Fault(
        "searches_ignore_the_namespace",
        PREFIXES,
        "        root = root_of(pool.layout.fingerprint, tenant, request.namespace)",
        '        root = root_of(pool.layout.fingerprint, tenant, "")',
        NAMESPACES,
        "named",
    ),
    Fault(
        "a_follower_that_is_overrun_is_not_told",
        "control_plane/watching.py",
        "        if found is None:\n",
        "        if found is None:\n            return None\n        if found is None:\n",
        WATCH,
        "overrun",
    ),
    Fault(
        "a_follower_that_is_overrun_goes_on",
        "control_plane/watching.py",
        "        if found is None:\n",
        "        while found is None:\n"
        "            self._revision += 1\n"
        "            found = pool.primary.changes_since(\n"
        "                pool.native_revision_of(self._revision), self._root, _MAX_ELEMENTS\n"
        "            )\n        if found is None:\n",
        WATCH,
        "overrun",
    ),
    Fault(
        "negative_tokens_are_looked_up",
        "control_plane/checks.py",
        "if not value[3::4].isascii():",
        "if False:",
        QUESTIONS,
    ),
    Fault(
        "a_part_of_a_token_is_left_out",
        "control_plane/checks.py",
        "if len(value) % 4:",
        "if False:",
        QUESTIONS,
    ),
    Fault(
        "all_watchers_are_asked",
        "control_plane/registration/registration.py",
        "        for pool in self.touched:\n",
        "        for pool in self._pools.values():\n"
        "            for watcher in pool.watchers:\n                watcher.wake()\n"
        "        for pool in self.touched:\n",
        TOLD,
        "pools_streams",
    ),
    Fault(
        "everybody_is_told_news_of_one",
        "control_plane/core.py",
        "        return [unsent for each in admissions for unsent in each.news.take_unsent()]\n",
        "        everybody = [s for each in admissions for s in each.sessions.values()]\n"
        "        return [(session.id, session.news or cpb.News()) for session in everybody]\n",
        TOLD,
        "has_news",
    ),
    Fault(
        "all_sessions_are_looked_at",
        "control_plane/sessions/sessions.py",
        "        session.expires_at_s = self._clock() + self._config.lease_s\n",
        "        session.expires_at_s = self._clock() + self._config.lease_s\n"
        "        sum(each.num_held() for each in self.by_id.values())\n",
        SHARERS,
        "thousand_sessions",
    ),
    Fault(
        "the_queue_is_not_told_of_an_abort",
        "control_plane/steps/requests.py",
        "        admission.apply(session)\n",
        "",
        "tests/unit/core/test_groups_walk.py",
    ),
)
