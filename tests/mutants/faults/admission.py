"""Faults of the queue for blocks: each leaves out one of its rules, or a part of it.

Some starve a session in a case of the checker; the others are noticed by the test of one behaviour.
"""

from __future__ import annotations

from dataclasses import replace

from tests.mutants.fault import Fault, planted

QUEUE = "control_plane/admission/queue.py"
VICTIMS = "control_plane/admission/victims.py"
TURNS = "control_plane/admission/turns.py"
CHECKER = "tests/unit/admission/test_admission_checker.py"
BEHAVIOURS = " + ".join(
    f"tests/unit/admission/test_admission_{part}.py" for part in ("queue", "turns", "victims")
)
ASKED = "        must_wait = self.check_admission("


def starving(case: str) -> str:
    """Return the checker's test of a case."""
    return f"{CHECKER}::test_nobody_is_starved[{case}]"


HOSTILE, WHOLE = starving("big honest and hostile"), starving("two, of the whole pool")
WITH_TWO = f"{CHECKER}::test_nobody_is_starved_in_a_larger_case[honest and hostile with two]"

CLOCKS_NEVER_STAND = Fault(  # rule 7
    "clocks_never_stand",
    TURNS,
    "sequence.ends_s += now_s - sequence.blocked_s",
    "pass",
    BEHAVIOURS,
    also=((VICTIMS, "if sequence.num_blocked or not (is_past", "if not (is_past"),),
)
WHO_WAS_ASKED_ONCE = Fault(  # rules 4 and 8
    "who_was_asked_once_leaves_for_free",
    QUEUE,
    "reason = leaving.reason",
    "reason = leaving.reason or (None if leaving.deadline_s is None else Reason.GROWTH)",
    BEHAVIOURS,
)
FAULTS = (
    # 1: one place a session, first come, first served.
    Fault(
        "the_head_is_passed",
        QUEUE,
        "return head is None or head.session.id == session",
        "return True",
        HOSTILE,
    ),
    Fault(
        "polling_keeps_a_position", QUEUE, "if entry is None and not wait:", "if False:", BEHAVIOURS
    ),
    Fault(
        "asking_again_loses_the_position",
        QUEUE,
        ASKED,
        f"        self.withdraw(session, sequence)\n{ASKED}",
        HOSTILE,
    ),
    Fault(
        "a_session_has_many_places",
        QUEUE,
        ASKED,
        "        if session in self._entries:\n"
        f"            self._entries[session].sequence = sequence\n{ASKED}",
        BEHAVIOURS,
    ),
    # 2: grants are pushed.
    *planted(
        QUEUE,
        HOSTILE,
        {
            "admissions_are_not_pushed": (
                "return Admission(head.session.id, head.sequence, head.num_needed)",
                "return None",
            ),
            "growth_is_not_pushed": ("if oldest.session.is_busy or", "if True or"),
            # 3: growth before admissions, the oldest first.
            "admissions_come_before_growth": ("if not blocked and is_first and", "if is_first and"),
        },
    ),
    Fault(
        "younger_growth_passes",
        QUEUE,
        "return is_oldest and num_needed",
        "return num_needed",
        BEHAVIOURS,
    ),
    Fault(
        "impossible_growth_waits",
        QUEUE,
        "if may_grow or pool.num_held(session, sequence) + num_needed > pool.num_blocks:",
        "if may_grow:",
        BEHAVIOURS,
    ),
    # 4: growth blocked for a grace period makes the most junior session yield.
    Fault("nobody_yields_to_growth", VICTIMS, "if not blocked:", "if True:", WHOLE),
    Fault(
        "nobody_yields_to_its_own_growth",
        VICTIMS,
        "            yield sequence, Reason.GROWTH",
        "            if session is not senior:\n                yield sequence, Reason.GROWTH",
        starving("one, with two of over half"),
    ),
    Fault(
        "only_to_its_own_growth",
        VICTIMS,
        "            yield sequence, Reason.GROWTH",
        "            if session is senior:\n                yield sequence, Reason.GROWTH",
        WHOLE,
    ),
    Fault(
        "growth_cuts_the_senior",
        VICTIMS,
        "_juniors(turns, blocked)),",
        "[*_juniors(turns, blocked)][::-1]),",
        BEHAVIOURS,
    ),
    Fault(
        "seniority_is_lost_with_every_cut",
        TURNS,
        "if reason is not Reason.GROWTH:",
        "if True:",
        BEHAVIOURS,
    ),
    Fault("seniority_is_never_lost", TURNS, "if reason is not Reason.GROWTH:", "if False:", WHOLE),
    WHO_WAS_ASKED_ONCE,
    replace(WHO_WAS_ASKED_ONCE, name=f"{WHO_WAS_ASKED_ONCE.name}, starving", killed_by=WITH_TWO),
    # 5: a sequence that outstays its turn yields while others wait.
    Fault(
        "turns_never_end", VICTIMS, "if not waiting:", "if True:", starving("honest and hostile")
    ),
    Fault(
        "the_newest_turn_ends_first",
        VICTIMS,
        "_past_turn(turns, queue, waiting, pool, config.idle_s, now_s)),",
        "[*_past_turn(turns, queue, waiting, pool, config.idle_s, now_s)][::-1]),",
        BEHAVIOURS,
    ),
    Fault("who_is_cut_keeps_its_position", QUEUE, "self._to_the_back(entry)", "pass", BEHAVIOURS),
    *planted(
        VICTIMS,
        BEHAVIOURS,
        {
            "idle_ones_keep_their_turn": ("return sequence.idles_s < now_s", "return False"),
            "what_is_computed_is_idle": (
                "(now_s if is_computed else progress_s) + idle_s",
                "progress_s + idle_s",
            ),
            "the_blocked_are_idle": (
                "            if sequence.num_blocked or not (is_past",
                "            is_past = is_past and not sequence.num_blocked\n"
                "            if not (is_past",
            ),
            "nothing_is_too_much": (
                "return pool.num_held_by(session.id) / (most * pool.num_blocks)",
                "return 0.0",
            ),
        },
    ),
    # 6: a turn that was cut doubles the session's next one, which is paid for.
    Fault(
        "turns_are_not_doubled",
        TURNS,
        "self._max_doublings = max_doublings",
        "self._max_doublings = 0",
        WHOLE,
    ),
    *planted(
        VICTIMS,
        BEHAVIOURS,
        {
            "long_turns_are_free": ("return turns.length_s(sequence) * num_shares", "return 0.0"),
            "blocks_cost_nothing": (
                "return turns.length_s(sequence) * num_shares",
                "return turns.length_s(sequence) if num_shares else 0.0",
            ),
            "the_first_long_turn_costs_too": ("if progress_s + idle_s >= now_s:", "if False:"),
        },
    ),
    Fault(
        "what_is_owed_does_not_add_up",
        TURNS,
        "since_s = max(session.penalty_until_s, sequence.deadline_s or 0.0)",
        "since_s = sequence.deadline_s or 0.0",
        BEHAVIOURS,
    ),
    Fault(
        "a_long_turn_is_one_of_many",
        TURNS,
        "return self.penalty_until_s > now_s or (",
        "return self.penalty_until_s > now_s or False and (",
        BEHAVIOURS,
    ),
    Fault(
        "nobody_is_chosen",
        QUEUE,
        "return next(ready, next(iter(entries), None))",
        "return next(ready, None)",
        BEHAVIOURS,
    ),
    Fault(
        "idleness_doubles",
        TURNS,
        "if reason is Reason.TURN:",
        "if reason in (Reason.TURN, Reason.IDLE):",
        BEHAVIOURS,
    ),
    Fault("turns_stay_long", TURNS, "elif done and reason is None:", "elif False:", BEHAVIOURS),
    Fault(  # and rule 8
        "yielding_makes_turns_short",
        TURNS,
        "        if reason is not Reason.GROWTH:",
        "        if done:\n            session.num_doublings = 0\n"
        "        if reason is not Reason.GROWTH:",
        starving("two that yield"),
    ),
    # 7: the clock of a turn stands while its sequence is blocked.
    CLOCKS_NEVER_STAND,
    replace(CLOCKS_NEVER_STAND, name=f"{CLOCKS_NEVER_STAND.name}, starving", killed_by=WITH_TWO),
    # 8: a request to yield names a deadline.
    Fault(
        "cuts_are_not_announced",
        VICTIMS,
        "    sequence.reason = reason\n",
        "    sequence.reason, sequence.deadline_s = reason, now_s\n",
        BEHAVIOURS,
    ),
    Fault(
        "deadlines_are_put_off",
        VICTIMS,
        "    sequence.reason = reason\n",
        "    sequence.reason, sequence.deadline_s = reason, None\n",
        WHOLE,
    ),
    Fault(
        "more_yield_than_needed",
        VICTIMS,
        "return num_for_growth, num_for_growth + num_for_head",
        "return 1 << 40, 1 << 40",
        BEHAVIOURS,
    ),
    # 10: a session whose missing receipts keep blocks from others is ended.
    Fault(
        "receipts_may_be_missing",
        VICTIMS,
        "since_s < long_ago_s and _other_waits(waiting, session)",
        "False",
        HOSTILE,
    ),
    Fault(
        "sessions_are_ended_for_nobody",
        VICTIMS,
        "since_s < long_ago_s and _other_waits(waiting, session)",
        "since_s < long_ago_s",
        BEHAVIOURS,
    ),
    Fault(
        "places_are_not_counted",
        QUEUE,
        "return ticket - next(iter(self._entries.values())).ticket + 1 if self._entries else 1",
        "return 1",
        BEHAVIOURS,
    ),
    Fault(
        "pending_blocks_count_for_nothing",
        VICTIMS,
        "pool.num_obtainable(first) + pool.num_pending(first)",
        "pool.num_obtainable(first)",
        BEHAVIOURS,
    ),
)
