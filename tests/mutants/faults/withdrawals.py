"""Faults of withdrawals, and of what a data plane is told that comes back."""

from __future__ import annotations

from tests.mutants.fault import Fault

POOL, SHARDS = "control_plane/pools/pool.py", "control_plane/pools/shards.py"
WITHDRAWALS = "tests/unit/core/test_prefixes.py"
MISSED = "tests/unit/registration/test_missed_messages.py"
FILES_BEHIND = (
    f"{MISSED}::test_files_are_forgotten_behind_blocks_that_were_withdrawn_while_it_was_away"
)
SENT_ONCE = f"{MISSED}::test_each_publication_is_sent_once_a_thousand_blocks_at_a_time"

FAULTS = (
    Fault(
        "resent_at_once",
        POOL,
        "first_block, first_block + MAX_PUBLICATIONS",
        "first_block, first_block + 10**6",
        SENT_ONCE,
    ),
    Fault(
        "the_last_blocks_are_left_out",
        POOL,
        "return messages, end if end < core.usage(_DEVICE)[0] else 0",
        "return (messages, end) if end < core.usage(_DEVICE)[0] else ([], 0)",
        SENT_ONCE,
    ),
    Fault(
        "files_are_forgotten_at_once",
        SHARDS,
        "        self.states[index].reconnect(hello, self.fences_for(index))\n",
        "        self.states[index].reconnect(hello, self.fences_for(index))\n"
        "        self.states[index].outgoing.extend(self.forgets_for(hello))\n",
        FILES_BEHIND,
    ),
    Fault(
        "files_are_forgotten_beside",
        SHARDS,
        "if self.states[i].connected and i not in but:",
        "if self.states[i].connected:",
        FILES_BEHIND,
    ),
    Fault(
        "resent_from_the_middle",
        SHARDS,
        "        self.resends_from = None\n        self.outgoing.clear()",
        "        self.outgoing.clear()",
        f"{MISSED}::test_a_stream_that_breaks_again_begins_again",
        also=(
            (
                SHARDS,
                "self.resends_from = 0, 0",
                "self.resends_from = self.resends_from or (0, 0)",
            ),
        ),
    ),
    Fault(
        "never_sent",
        POOL,
        "while self._has_forgotten:",
        "while False:",
        f"{WITHDRAWALS}::test_a_control_plane_that_restarts_does_not_learn_what_was_forgotten",
    ),
    Fault(
        "sent_once",
        POOL,
        "if indices and core.counters()[_FORGOTTEN]:",
        "if False:",
        f"{WITHDRAWALS}::test_a_data_plane_that_was_away_withdraws_when_it_resumes",
    ),
)
