"""Faults of elections."""

from __future__ import annotations

from tests.mutants.fault import Fault, first

FILE = "control_plane/server/election/file_elector.py"
ELECTOR = "control_plane/server/election/elector.py"
ETCD = "integrations/etcd/elector.py"
TESTS = "tests/rpc/test_elections.py"

FAULTS = (
    Fault(  # The last leader's is not looked at.
        "incarnations_from_the_clock",
        FILE,
        "incarnation = next_incarnation(last)",
        'incarnation = __import__("time").time_ns()',
        f"{TESTS}::test_incarnations_rise_when_clocks_go_back",
        "file",
    ),
    Fault(
        "locks_are_not_held",
        FILE,
        "fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        f"{TESTS}::test_of_many_candidates_one_leads",
        "file",
    ),
    Fault(
        "losses_are_not_noticed",
        FILE,
        "while self._is_locked():",
        "while True:",
        f"{TESTS}::test_who_has_lost_is_interrupted_with_a_typed_error",
        "file",
    ),
    Fault(  # Who closes a connection is taken for dead, unasked.
        "closed_connections_are_deaths",
        ELECTOR,
        "        finally:\n            writer.close()",
        "        finally:\n            writer.close()\n        return",
        f"{TESTS}::test_a_process_has_died_when_its_connection_ends_and_another_is_refused",
    ),
    Fault(  # Who was followed by mistake renews a lease, and goes on.
        "former_leaders_do_not_look",
        ETCD,
        *first("    async def _is_replaced(self, timeout_s: float) -> bool:", "return False"),
        f"{TESTS}::test_a_leader_that_was_followed_by_mistake_ends",
        "etcd",
    ),
    Fault(  # Who was not told that it leads takes itself for another.
        "winners_wait_for_themselves",
        ETCD,
        "return leader.lease == self._lease",
        "return False",
        f"{TESTS}::test_a_candidate_leads_whose_transaction_was_not_answered",
        "etcd",
    ),
    Fault(
        "standbys_serve",
        "kvplane/serving/callers/identity.py",
        "if self.stands_by:",
        "if False:",
        f"{TESTS}::test_a_server_stands_by_until_it_leads_and_ends_when_it_has_lost",
    ),
)
