"""Which sequences compute in the next step, and what to do when blocks run short.

    waiting --admit--> running --swap out--> swapped
       ^                 |  ^                   |
       |---- recompute --|  |----- swap in -----|

The scheduler owns no block. It asks the control plane by operations and learns from each one's
status: LATER means that somebody must give way. Then it waits first for blocks that come back by
themselves (pending ones), and only after that takes the device blocks of the sequence that came
last: by swapping out while the host tier has room, else by freeing it to be computed again. The
sequence that goes first is never preempted by another, so there is always progress.

One step is scheduled, carried out and applied before the next one is scheduled.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from engine.policy import FirstComeFirstServed, Policy
from engine.runner import Row
from engine.sequence import Sequence, Status
from kvplane import ops
from kvplane.error_codec import from_wire
from kvplane.errors import InternalError, KvplaneError, NeverFitsError, SequenceNotFoundError
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as types

PATIENCE_STEPS: Final = (
    32  # steps to wait for pending blocks, or without any progress, before more is given up
)


class Kind(Enum):
    """What an operation is for."""

    FORK = "fork"
    FREE = "free"
    SWAP_OUT = "swap_out"
    APPEND = "append"
    SWAP_IN = "swap_in"
    ADMIT = "admit"


@dataclass(frozen=True, slots=True)
class Intent:
    """One operation of a step, and whom it is for."""

    kind: Kind
    operation: pb.Operation
    sequences: tuple[Sequence, ...] = ()
    num_slots: int = 0


@dataclass(slots=True)
class Outcome:
    """What a step brought: rows to compute, in the plan's order, and requests that failed alone."""

    rows: list[Row] = field(default_factory=list)
    failed: list[tuple[Sequence, KvplaneError]] = field(default_factory=list)


@dataclass(slots=True)
class Counts:
    """What the scheduler has done. They never fall."""

    num_swap_preemptions: int = 0
    num_recompute_preemptions: int = 0
    num_swap_ins: int = 0
    num_admissions: int = 0
    num_forks: int = 0


class Scheduler:
    """Queues of sequences. ``max_batch_tokens``: tokens computed in a step; ``max_sequences``:
    sequences on the device tier.
    """

    def __init__(
        self,
        *,
        block_size_tokens: int,
        max_batch_tokens: int,
        max_sequences: int,
        policy: Policy | None = None,
    ) -> None:
        self._block_size_tokens = block_size_tokens
        self._max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self._key = (policy or FirstComeFirstServed()).key
        self._next_kv_id = 1
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self._forks: list[tuple[int, Sequence]] = []
        self._frees: list[int] = []
        self._blocked: list[Sequence] = []
        self._must_preempt = False
        self._tight = False  # somebody was preempted and nobody has finished since
        self._no_swap: set[int] = set()  # kv ids that the host tier had no room for
        self._num_waits = 0
        self._num_idle = 0
        self._num_device_available: int | None = None
        self._num_host_free = 0
        self.counts = Counts()

    # What comes in and goes out.

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has no blocks."""
        sequence.forget_blocks()
        insort(self.waiting, sequence, key=self._key)

    def branch(self, parent: Sequence, alive: Seq[Sequence]) -> None:
        """Continue the computed prompt of ``parent`` as ``alive`` (which may or may not hold
        ``parent`` itself).

        The first of them takes over the parent's blocks; the next step forks the others from it.
        """
        kv_id, computed, blocks = parent.kv_id, parent.num_computed, parent.num_blocks
        self.running.remove(parent)
        if parent not in alive:
            parent.status, parent.kv_id = Status.FINISHED, 0
        if not alive:
            self._frees.append(kv_id)
            return
        for i, sequence in enumerate(alive):
            sequence.num_sent = sequence.num_computed = computed
            sequence.num_blocks = blocks
            if i == 0:
                sequence.kv_id, sequence.status = kv_id, Status.RUNNING
                self.running.append(sequence)
            else:
                sequence.kv_id, sequence.status = self._new_kv_id(), Status.FORKING
                self._forks.append((kv_id, sequence))

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue; its blocks are freed by the next step."""
        if sequence.status is Status.FORKING:
            self._forks = [(p, s) for p, s in self._forks if s is not sequence]
        elif sequence.status is not Status.FINISHED:
            self._queue_of(sequence).remove(sequence)
            if sequence.kv_id:
                self._frees.append(sequence.kv_id)
        sequence.status, sequence.kv_id = Status.FINISHED, 0
        self._blocked = [s for s in self._blocked if s is not sequence]
        self._tight = False

    @property
    def has_work(self) -> bool:
        """Whether there is a sequence to go on with, or something to give back."""
        return bool(self.waiting or self.running or self.swapped or self._forks or self._frees)

    @property
    def num_idle_steps(self) -> int:
        """Steps in a row that brought nobody forward."""
        return self._num_idle

    def head(self) -> Sequence | None:
        """The live sequence that goes first."""
        return min((*self.waiting, *self.running, *self.swapped), key=self._key, default=None)

    # One step.

    def schedule(self) -> list[Intent]:
        """The operations of the next step, in the order in which the control plane is to apply
        them.
        """
        intents = self._fork_intents()
        preempted = self._preempt() if self._must_preempt else []
        intents += [Intent(Kind.FREE, ops.free(kv_id)) for kv_id in self._frees]
        self._frees = []
        intents += preempted
        victims = {s.kv_id for intent in preempted for s in intent.sequences}
        budget = self._max_batch_tokens
        for sequence in self._compute_order(victims):
            num_slots = min(sequence.num_uncomputed, budget)
            if num_slots > 0:
                intents.append(_append(sequence, num_slots))
                budget -= num_slots
        if not self._blocked and not preempted:
            intents += self._swap_in_intents()
            if not self.swapped:
                intents += self._admit_intents(budget)
        self._must_preempt = False
        return intents

    def apply(self, intents: Seq[Intent], result: pb.StepResult) -> Outcome:
        """Learn what came of ``intents``; ``result.results`` runs beside them."""
        if len(result.results) != len(intents):
            raise InternalError(f"{len(result.results)} results for {len(intents)} operations")
        outcome = Outcome()
        self._blocked = []
        num_pending = 0
        for intent, done in zip(intents, result.results, strict=True):
            num_pending = max(num_pending, done.shortage.num_blocks_pending)
            _APPLY[intent.kind](self, intent, done, outcome)
        self._note_usage(result.usage)
        if not self._blocked:
            self._num_waits = 0
        elif num_pending > 0 and self._num_waits < PATIENCE_STEPS:
            self._num_waits += 1
        else:
            self._must_preempt, self._num_waits = True, 0
        self._num_idle = 0 if result.HasField("plan") else self._num_idle + 1
        if self._num_idle >= PATIENCE_STEPS and not self.running:
            self._give_up_swapped()
        return outcome

    # When things go wrong.

    def reset(self) -> None:
        """Every block is lost: all live sequences wait to be admitted and computed again."""
        live = [*self.running, *self.swapped, *(s for _, s in self._forks)]
        self.running, self.swapped, self._forks, self._frees = [], [], [], []
        self._blocked, self._must_preempt, self._num_waits, self._num_idle = [], False, 0, 0
        self._no_swap.clear()
        self._num_device_available = None
        for sequence in self.waiting:
            sequence.forget_blocks()
        for sequence in live:
            self.add(sequence)

    def reconcile(self, states: Iterable[pb.SequenceState]) -> None:
        """A plan was given up: take what the control plane says of every sequence, and free what
        nobody wants.
        """
        known = {state.sequence_id: state for state in states}
        live = [*self.running, *self.swapped]
        self.running, self.swapped, self._blocked = [], [], []
        self._must_preempt = False
        for sequence in live:
            state = known.pop(sequence.kv_id, None)
            if state is None:
                self.add(sequence)
                continue
            sequence.num_sent, sequence.num_blocks = state.num_tokens, state.num_blocks
            sequence.num_computed = state.num_scheduled_tokens
            on_host = state.tier == types.TIER_HOST
            sequence.status = Status.SWAPPED if on_host else Status.RUNNING
            self._queue_of(sequence).append(sequence)
        self._frees = list(known)

    # Scheduling.

    def _fork_intents(self) -> list[Intent]:
        intents = []
        for parent_id, sequence in self._forks:
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            fork = ops.fork(parent_id, sequence.kv_id)
            intents.append(Intent(Kind.FORK, fork, (sequence,)))
        self._forks = []
        return intents

    def _preempt(self) -> list[Intent]:
        """Take the device blocks of whoever goes last."""
        victims = self._victims()
        if not victims:
            return []
        self._tight = True
        num_blocks = sum(s.num_blocks for s in victims)
        refused = any(s.kv_id in self._no_swap for s in victims)
        if num_blocks <= self._num_host_free and not refused:
            swap = ops.swap_out([s.kv_id for s in victims])
            return [Intent(Kind.SWAP_OUT, swap, tuple(victims))]
        self.counts.num_recompute_preemptions += len(victims)
        for sequence in victims:
            self.running.remove(sequence)
            self._recompute(sequence)
        return []

    def _victims(self) -> list[Sequence]:
        """All running continuations of the last request, so that blocks they share move once and
        are really given up; only the last continuation when no other request runs. Nobody gives way
        to itself.
        """
        order = sorted(self.running, key=self._key)
        if len(order) < 2:
            return []
        last = order[-1].request
        if order[0].request is last:
            return order[-1:]
        return [s for s in order if s.request is last]

    def _compute_order(self, victims: set[int]) -> list[Sequence]:
        """Sequences that need one token first, so that a long prompt does not hold them up; each
        part in order.
        """
        order = (s for s in self.running if s.kv_id not in victims)
        return sorted(order, key=lambda s: (s.num_uncomputed > 1, self._key(s)))

    def _swap_in_intents(self) -> list[Intent]:
        intents: list[Intent] = []
        num_running, num_blocks = self._num_on_device(), 0
        groups: dict[str, list[Sequence]] = {}
        for sequence in sorted(self.swapped, key=self._key):
            groups.setdefault(sequence.request.request_id, []).append(sequence)
        for group in groups.values():
            num_running += len(group)
            num_blocks += sum(s.num_blocks for s in group)
            lonely = not self.running and not intents
            if not lonely and (
                num_running > self.max_sequences or not self._has_room(num_blocks + num_running)
            ):
                break
            swap = ops.swap_in([s.kv_id for s in group])
            intents.append(Intent(Kind.SWAP_IN, swap, tuple(group)))
        return intents

    def _admit_intents(self, budget: int) -> list[Intent]:
        intents: list[Intent] = []
        num_running, num_blocks = self._num_on_device(), 0
        for sequence in self.waiting:
            num_running += sequence.num_continuations
            num_blocks += -(-len(sequence.tokens) // self._block_size_tokens)
            is_head = not intents and (not self._tight or not self.running)
            if budget <= 0 or num_running > self.max_sequences:
                break
            if not is_head and not self._has_room(num_blocks + num_running):
                break
            sequence.kv_id = self._new_kv_id()
            num_compute = min(budget, len(sequence.tokens))
            budget -= num_compute
            admit = ops.admit(
                sequence.kv_id,
                sequence.tokens,
                num_compute_tokens=num_compute,
                max_total_tokens=sequence.max_total_tokens,
            )
            intents.append(Intent(Kind.ADMIT, admit, (sequence,)))
        return intents

    def _has_room(self, num_blocks: int) -> bool:
        available = self._num_device_available
        return available is None or num_blocks <= available

    def _num_on_device(self) -> int:
        return sum(s.num_continuations for s in self.running)

    # Applying.

    def _applied_fork(self, intent: Intent, done: pb.OperationResult, outcome: Outcome) -> None:
        if done.status == pb.OPERATION_STATUS_OK:
            self.counts.num_forks += 1
            return
        (sequence,) = intent.sequences
        self.running.remove(sequence)
        self.add(sequence)

    def _applied_free(self, intent: Intent, done: pb.OperationResult, outcome: Outcome) -> None:
        if done.status == pb.OPERATION_STATUS_FAILED:
            error = from_wire(done.error)
            if not isinstance(error, SequenceNotFoundError):
                raise error

    def _applied_swap_out(self, intent: Intent, done: pb.OperationResult, outcome: Outcome) -> None:
        if done.status != pb.OPERATION_STATUS_OK:
            self._no_swap.update(s.kv_id for s in intent.sequences)
            return
        self.counts.num_swap_preemptions += len(intent.sequences)
        for sequence in intent.sequences:
            self.running.remove(sequence)
            sequence.status = Status.SWAPPED
            self.swapped.append(sequence)

    def _applied_swap_in(self, intent: Intent, done: pb.OperationResult, outcome: Outcome) -> None:
        if done.status != pb.OPERATION_STATUS_OK:
            return
        self.counts.num_swap_ins += len(intent.sequences)
        for sequence in intent.sequences:
            self.swapped.remove(sequence)
            sequence.status = Status.RUNNING
            self.running.append(sequence)

    def _applied_append(self, intent: Intent, done: pb.OperationResult, outcome: Outcome) -> None:
        (sequence,) = intent.sequences
        if sequence.status is not Status.RUNNING:  # its fork failed in this very step
            return
        if done.status == pb.OPERATION_STATUS_OK:
            self._compute(sequence, done.append.first_position, intent.num_slots, outcome)
            sequence.num_sent = len(sequence.tokens)
            sequence.num_blocks = done.append.num_blocks
        elif done.status == pb.OPERATION_STATUS_LATER:
            self._blocked.append(sequence)
        else:
            outcome.failed.append((sequence, _error_of(done, sequence)))

    def _applied_admit(self, intent: Intent, done: pb.OperationResult, outcome: Outcome) -> None:
        (sequence,) = intent.sequences
        if done.status == pb.OPERATION_STATUS_OK:
            self.waiting.remove(sequence)
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            sequence.num_sent = len(sequence.tokens)
            sequence.num_blocks = done.admit.num_blocks
            if sequence.num_admissions == 0:
                sequence.num_cached_tokens = done.admit.num_cached_tokens
            sequence.num_admissions += 1
            self.counts.num_admissions += 1
            cached, scheduled = done.admit.num_cached_tokens, done.admit.num_scheduled_tokens
            self._compute(sequence, cached, scheduled, outcome)
            return
        sequence.kv_id = 0
        if done.status != pb.OPERATION_STATUS_LATER:
            outcome.failed.append((sequence, _error_of(done, sequence)))

    def _compute(self, sequence: Sequence, first: int, num_tokens: int, outcome: Outcome) -> None:
        sequence.num_computed = first + num_tokens
        if num_tokens > 0:
            is_last = sequence.num_uncomputed == 0
            outcome.rows.append(Row(sequence, first, num_tokens, is_last))

    def _note_usage(self, usage: pb.PoolUsage) -> None:
        for tier in usage.tiers:
            if tier.tier == types.TIER_DEVICE:
                self._num_device_available = (
                    tier.num_free_blocks + tier.num_cached_blocks + tier.num_limbo_blocks
                )
            elif tier.tier == types.TIER_HOST:
                self._num_host_free = tier.num_free_blocks

    # Leaves.

    def _recompute(self, sequence: Sequence) -> None:
        self._frees.append(sequence.kv_id)
        self._no_swap.discard(sequence.kv_id)
        self.add(sequence)

    def _give_up_swapped(self) -> None:
        """Nothing moves and nothing runs: a group that swapped out together may never fit together
        again, but each alone does.
        """
        self.counts.num_recompute_preemptions += len(self.swapped)
        swapped, self.swapped = self.swapped, []
        for sequence in swapped:
            self._recompute(sequence)

    def _queue_of(self, sequence: Sequence) -> list[Sequence]:
        queues = {
            Status.WAITING: self.waiting,
            Status.RUNNING: self.running,
            Status.SWAPPED: self.swapped,
        }
        return queues[sequence.status]

    def _new_kv_id(self) -> int:
        kv_id, self._next_kv_id = self._next_kv_id, self._next_kv_id + 1
        return kv_id


_APPLY: Final = {
    Kind.FORK: Scheduler._applied_fork,
    Kind.FREE: Scheduler._applied_free,
    Kind.SWAP_OUT: Scheduler._applied_swap_out,
    Kind.APPEND: Scheduler._applied_append,
    Kind.SWAP_IN: Scheduler._applied_swap_in,
    Kind.ADMIT: Scheduler._applied_admit,
}


def _append(sequence: Sequence, num_slots: int) -> Intent:
    append = ops.append(sequence.kv_id, sequence.tokens[sequence.num_sent :], num_slots=num_slots)
    return Intent(Kind.APPEND, append, (sequence,), num_slots)


def _error_of(done: pb.OperationResult, sequence: Sequence) -> KvplaneError:
    """The typed error behind a NEVER or FAILED result."""
    if done.status == pb.OPERATION_STATUS_NEVER:
        return NeverFitsError(
            f"{sequence.max_total_tokens} tokens need {done.shortage.num_blocks_needed} blocks, "
            f"and the pool can give {done.shortage.num_blocks_available}"
        )
    return from_wire(done.error)
