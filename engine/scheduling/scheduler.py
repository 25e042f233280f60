"""Decides which sequences compute in the next step, and what to do when blocks run short.

The scheduler owns no block. It asks the control plane by operations and learns from the status of
each of their items: LATER means that blocks run short. An admission then waits in the control
plane's queue, and is not asked for again: the news of a later answer report its grant. For growth
the scheduler first waits for pending blocks, which come back by themselves. Then it preempts the
sequence that came last: it swaps it out if the host tier has room, else frees it to be computed
again. Sequences that the control plane asks for are preempted likewise. The sequence that goes
first is never preempted by another of this engine, so there is always progress.

A step may be scheduled while the plan of the one before is computed: tokens that are due are
planned before they are known. A sequence that ends meanwhile is computed for nothing, and freed by
the step after. While all sequences decode, one plan has several tokens of each, computed in passes,
so that the control plane is asked once for all of them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Final

from kvplane import ops
from kvplane.errors import InternalError, PositionMismatchError, SequenceNotFoundError
from kvplane.results import (
    Granted,
    OperationResult,
    SequenceState,
    SessionNews,
    StepResult,
    TierUsage,
)
from kvplane.wire.v1 import types_pb2 as types

from ..stats import EngineStats
from .intents import Failures, Intent, Kind, Outcome, Span
from .sequence import EngineSequence, SequenceStatus, most_passes

# Steps to wait for pending blocks, or without any progress, before more is preempted.
PATIENCE_STEPS: Final = 32
_PLACE: Final = attrgetter("place")


class _Room:
    """Free device blocks of the pool after the last step; ``num_host_blocks``: on the host."""

    def __init__(self) -> None:
        self.num_host_blocks = 0
        self._num_device_blocks: int | None = None  # None: not known yet

    def note(self, usage: Iterable[TierUsage]) -> None:
        """Record the free blocks from a step's answer."""
        for tier in usage:
            if tier.tier == types.TIER_DEVICE:
                self._num_device_blocks = (
                    tier.num_free_blocks + tier.num_cached_blocks + tier.num_retired_blocks
                )
            elif tier.tier == types.TIER_HOST:
                self.num_host_blocks = tier.num_free_blocks

    def fits(self, num_blocks: int) -> bool:
        """Return whether the device tier has room for so many blocks."""
        return self._num_device_blocks is None or num_blocks <= self._num_device_blocks


class _Queues:
    """Each live sequence is in one of ``waiting``, ``running`` and ``swapped``, or is to be forked
    by the next step.

    waiting --admit--> running --swap out--> swapped
    ^                 |  ^                   |
    |---- recompute --|  |----- swap in -----|
    """

    def __init__(self) -> None:
        self._next_kv_id = 1
        self.waiting: list[EngineSequence] = []
        self.running: list[EngineSequence] = []
        self.swapped: list[EngineSequence] = []
        self._forks: list[tuple[int, EngineSequence]] = []  # with the kv id of the parent
        self._frees: list[int] = []
        self._finished: list[tuple[int, EngineSequence]] = []  # sequences to be freed

    @property
    def has_work(self) -> bool:
        """Return whether there is a live sequence, or something to free."""
        return bool(self.waiting or self.running or self.swapped or self._forks or self._frees)

    def head(self) -> EngineSequence | None:
        """Return the live sequence that goes first."""
        return min((*self.waiting, *self.running, *self.swapped), key=_PLACE, default=None)

    def arrive(self, sequence: EngineSequence) -> None:
        """Queue the first sequence of a request."""
        self.add(sequence)

    def add(self, sequence: EngineSequence) -> None:
        """Queue a sequence that has no blocks."""
        sequence.forget_blocks()
        insort(self.waiting, sequence, key=_PLACE)

    def branch(self, parent: EngineSequence, sequences: Sequence[EngineSequence]) -> None:
        """Replace a computed sequence by ``sequences``, which continue its tokens and may or may
        not include ``parent`` itself; those with a finish reason end here.

        The first that continues takes over the parent's blocks; the next step forks the others from
        it.
        """
        kv_id, blocks = parent.kv_id, parent.num_blocks
        sent, computed, state = parent.num_sent, parent.num_computed, parent.state
        self.running.remove(parent)
        parent.status = SequenceStatus.FINISHED
        alive = [s for s in sequences if not s.finish_reason]
        if not alive:
            self._frees.append(kv_id)
        for sequence in sequences:
            sequence.status, sequence.kv_id = SequenceStatus.FINISHED, 0
        for i, sequence in enumerate(alive):
            sequence.num_sent, sequence.num_computed, sequence.num_due = sent, computed, 0
            sequence.num_blocks = blocks
            sequence.state = state if i == 0 or state is None else state.copy()
            if i == 0:
                sequence.kv_id, sequence.status = kv_id, SequenceStatus.RUNNING
                self.running.append(sequence)
            else:
                sequence.kv_id, sequence.status = self._new_kv_id(), SequenceStatus.FORKING
                self._forks.append((kv_id, sequence))

    def finish(self, sequence: EngineSequence) -> None:
        """Remove a sequence from its queue; the next step frees its blocks."""
        if sequence.status is SequenceStatus.FORKING:
            self._forks = [(p, s) for p, s in self._forks if s is not sequence]
        elif sequence.status is not SequenceStatus.FINISHED:
            self._queue_of(sequence).remove(sequence)
            if sequence.kv_id:
                self._frees.append(sequence.kv_id)
                self._finished.append((sequence.kv_id, sequence))
        sequence.status, sequence.kv_id = SequenceStatus.FINISHED, 0

    def _queue_of(self, sequence: EngineSequence) -> list[EngineSequence]:
        queues = {
            SequenceStatus.WAITING: self.waiting,
            SequenceStatus.RUNNING: self.running,
            SequenceStatus.SWAPPED: self.swapped,
        }
        return queues[sequence.status]

    def _new_kv_id(self) -> int:
        kv_id, self._next_kv_id = self._next_kv_id, self._next_kv_id + 1
        return kv_id


class Scheduler(_Queues):
    """Decides which operations the next step has. ``max_batch_tokens``: tokens computed in a step;
    ``max_sequences``: sequences on the device tier.
    """

    has_states = False
    """True if sequences have running states, which are not swapped, and begin after admission."""

    def __init__(
        self,
        *,
        block_size_tokens: int,
        max_batch_tokens: int,
        max_sequences: int,
    ) -> None:
        super().__init__()
        self._block_size_tokens = block_size_tokens
        self._max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self._blocked: list[EngineSequence] = []
        self._must_preempt = False
        self._asked: set[int] = set()  # kv ids of sequences that the control plane will cut
        self._queued: EngineSequence | None = None  # the waiting one in the control plane's queue
        self._tight = False  # a sequence was preempted and none has finished since
        self._no_swap: set[int] = set()  # kv ids that the host tier had no room for
        self._num_waits = 0
        self._num_idle = 0
        self._room = _Room()
        self.stats = EngineStats()
        self.max_passes = 1
        """The next plan has at most so many; requests that arrive meanwhile wait for all."""

    def finish(self, sequence: EngineSequence) -> None:
        """Remove a sequence from its queue; the next step frees its blocks."""
        super().finish(sequence)
        if sequence is self._queued:
            self._queued = None
        self._blocked = [s for s in self._blocked if s is not sequence]
        self._tight = False

    @property
    def num_idle_steps(self) -> int:
        """Number of steps in a row that got no plan."""
        return self._num_idle

    @property
    def is_queued(self) -> bool:
        """Return whether an admission of this engine waits in the control plane's queue."""
        return self._queued is not None

    # One step.

    @property
    def can_run_ahead(self) -> bool:
        """Return whether the next step can be scheduled while the plan of the last is computed.
        Preempted sequences must not be in a running plan.
        """
        return not self._must_preempt and not self._asked

    def schedule(self) -> list[Intent]:
        """Return the operations of the next step, in the order in which they are applied."""
        intents = self._fork_intents()
        preempted = self._preempt() if self._must_preempt or self._asked else []
        num_passes = 1 if intents or preempted or self._is_changing else self.max_passes
        intents += self._free_intents()
        intents += preempted
        victims = {s.kv_id for intent in preempted for s in intent.sequences}
        appends = self._append_intents(victims, num_passes)
        intents += appends
        budget = self._max_batch_tokens - sum(sum(intent.num_slots) for intent in appends)
        if not self._blocked and not preempted:
            intents += self._swap_in_intents()
            if not self.swapped:
                intents += self._admit_intents(budget)
        self._must_preempt = False
        self._asked.clear()
        return intents

    def apply(self, intents: Sequence[Intent], result: StepResult) -> Outcome:
        """Apply a step's answer: ``intents`` are its operations, in the order of
        ``result.results``. Returns what to compute.
        """
        if len(result.results) != len(intents):
            raise InternalError(f"{len(result.results)} results for {len(intents)} operations")
        outcome = Outcome()
        news = result.news
        self._blocked = []
        self._note_cuts(news)
        num_pending = 0
        for intent, done in zip(intents, result.results, strict=True):
            failures = {failure.item: failure for failure in done.failures}
            for failure in done.failures:
                num_pending = max(num_pending, failure.num_blocks_pending)
            _APPLY[intent.kind](self, intent, done, failures, outcome)
        for grant in news.granted:
            self._granted(grant)
        self._room.note(result.usage)
        if not self._blocked:
            self._num_waits = 0
        elif num_pending > 0 and self._num_waits < PATIENCE_STEPS:
            self._num_waits += 1
        else:
            self._must_preempt, self._num_waits = True, 0
        self._num_idle = 0 if result.plan is not None else self._num_idle + 1
        if self._num_idle >= PATIENCE_STEPS and not self.running:
            self._recompute_swapped()
        return outcome

    # When things go wrong.

    def reset(self) -> None:
        """Prepare for a new session: the old one's blocks are lost, so live sequences wait to be
        admitted and computed again.
        """
        live = [*self.running, *self.swapped, *(s for _, s in self._forks)]
        self.running, self.swapped, self._forks = [], [], []
        self._frees, self._finished = [], []
        self._blocked, self._must_preempt, self._num_waits, self._num_idle = [], False, 0, 0
        self._queued = None
        self._asked.clear()
        self._no_swap.clear()
        self._room = _Room()
        for sequence in self.waiting:
            sequence.forget_blocks()
        for sequence in live:
            self.add(sequence)

    def reconcile(self, states: Iterable[SequenceState]) -> None:
        """Adopt the control plane's state of every sequence after plans were aborted, and free
        sequences that no request needs.
        """
        known = {state.sequence_id: state for state in states}
        live = [*self.running, *self.swapped]
        if self._queued is not None and self._queued.kv_id in known:
            live.append(self._queued)  # granted, before any answer reported it
            self.waiting.remove(self._queued)
            self._queued = None
        self.running, self.swapped, self._blocked = [], [], []
        self._must_preempt = False
        self.max_passes = 1  # the next plan may have whole tables, and is presented for each pass
        for sequence in live:
            state = known.pop(sequence.kv_id, None)
            if state is None:
                self.add(sequence)
                continue
            sequence.num_sent, sequence.num_blocks = state.num_tokens, state.num_blocks
            sequence.num_computed = state.num_scheduled_tokens
            # A beam that waits for others keeps its computed token.
            sequence.num_due = int(sequence.num_due > 0 and sequence.num_uncomputed <= 1)
            on_host = state.tier == types.TIER_HOST
            sequence.status = SequenceStatus.SWAPPED if on_host else SequenceStatus.RUNNING
            self._queue_of(sequence).append(sequence)
        self._frees, self._finished = list(known), []

    # Scheduling.

    def _fork_intents(self) -> list[Intent]:
        if not self._forks:
            return []
        parent_ids, sequences = zip(*self._forks, strict=True)
        self._forks = []
        for sequence in sequences:
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
        forks = ops.fork(parent_ids, [s.kv_id for s in sequences])
        return [Intent(Kind.FORK, forks, sequences)]

    def _free_intents(self) -> list[Intent]:
        """Return operations that free finished sequences. Before that, unsent tokens are sent if
        these complete a block, so that others find it.
        """
        if not self._frees:
            return []
        size = self._block_size_tokens
        late = [
            (kv_id, s) for kv_id, s in self._finished if s.num_computed // size > s.num_sent // size
        ]
        intents = [Intent(Kind.FREE, ops.free(self._frees))]
        self._frees, self._finished = [], []
        if late:
            intents.insert(0, self._append([(kv_id, s, 0) for kv_id, s in late]))
        return intents

    @property
    def _is_changing(self) -> bool:
        """Return whether sequences will soon start or end, so that a plan should be short."""
        can_admit = self.waiting and self._num_on_device() < self.max_sequences
        return bool(can_admit or self.swapped or self._blocked or self._tight)

    def _append_intents(self, victims: set[int], num_passes: int) -> list[Intent]:
        """Return one operation that appends to all running sequences but ``victims``, up to the
        batch's size and in at most ``num_passes`` passes.
        """
        budget = self._max_batch_tokens
        due: list[tuple[int, EngineSequence, int]] = []
        for sequence in self._compute_order(victims):
            if budget == 0:
                break
            num = min(sequence.num_uncomputed, budget)
            if num > 0 and sequence.can_run_ahead:
                due.append((sequence.kv_id, sequence, num))
                budget -= num
        if not due:
            return []
        in_passes = num_passes > 1 and all(sequence.can_pass for sequence in self.running)
        if in_passes:
            most = min(num_passes, most_passes(self.running))
            longer = [(kv_id, s, min(most, s.num_left)) for kv_id, s, _ in due]
            size = self._block_size_tokens
            in_passes = self._room.fits(sum(s.num_missing(n, size) for _, s, n in longer))
            due = longer if in_passes else due
        return [self._append(due, in_passes=in_passes)]

    def _append(
        self, items: Sequence[tuple[int, EngineSequence, int]], *, in_passes: bool = False
    ) -> Intent:
        """Return an append of known tokens and slots. ``items``: kv id, sequence, number
        of slots.
        """
        kv_ids, sequences, num_slots = zip(*items, strict=True)
        new_tokens = [s.tokens[s.num_sent :] for s in sequences]
        checkpoints = [*map(self._checkpoint, sequences, num_slots)]
        operation = ops.append(
            kv_ids,
            chain.from_iterable(new_tokens),
            num_slots,
            first_positions=[s.num_computed for s in sequences],
            num_tokens=[len(tokens) for tokens in new_tokens],
            checkpoint_positions=checkpoints if any(checkpoints) else 0,
        )
        num_known = tuple(len(s.tokens) for s in sequences)
        return Intent(Kind.APPEND, operation, sequences, num_slots, num_known, in_passes, kv_ids)

    def _checkpoint(self, sequence: EngineSequence, num_slots: int) -> int:
        """Return where a plan of ``num_slots`` keeps a checkpoint of a sequence's state; 0 for
        none.
        """
        return 0

    def _preempt(self) -> list[Intent]:
        """Return operations that swap out or free the sequences that go last."""
        victims = self._victims()
        if not victims:
            return []
        self._tight = True
        num_blocks = sum(s.num_blocks for s in victims)
        refused = any(s.kv_id in self._no_swap for s in victims)
        if num_blocks <= self._room.num_host_blocks and not refused and not self.has_states:
            swap = ops.swap([s.kv_id for s in victims], "host")
            return [Intent(Kind.SWAP_OUT, swap, tuple(victims))]
        self.stats.num_recompute_preemptions += len(victims)
        for sequence in victims:
            self.running.remove(sequence)
            self._recompute(sequence)
        return []

    def _victims(self) -> list[EngineSequence]:
        """Return the sequences to preempt: those that would be cut; else all running continuations
        of the last request, so that shared blocks move once and are really released; only the last
        one when no other request runs. The only running sequence is not preempted for its own sake.
        """
        asked = [s for s in self.running if s.kv_id in self._asked]
        if asked:
            return asked
        order = sorted(self.running, key=_PLACE)
        if len(order) < 2:
            return []
        last = order[-1].request
        if order[0].request is last:
            return order[-1:]
        return [s for s in order if s.request is last]

    def _compute_order(self, victims: set[int]) -> list[EngineSequence]:
        """Return the running sequences with those that need one token first, so that a long prompt
        does not delay them; each part in order.
        """
        order = (s for s in self.running if s.kv_id not in victims)
        return sorted(order, key=lambda s: (s.num_uncomputed > 1, s.place))

    def _swap_in_intents(self) -> list[Intent]:
        intents: list[Intent] = []
        num_running, num_blocks = self._num_on_device(), 0
        groups: dict[str, list[EngineSequence]] = {}
        for sequence in sorted(self.swapped, key=_PLACE):
            groups.setdefault(sequence.request.request_id, []).append(sequence)
        for group in groups.values():
            num_running += len(group)
            num_blocks += sum(s.num_blocks for s in group)
            is_alone = not self.running and not intents
            if not is_alone and (
                num_running > self.max_sequences or not self._room.fits(num_blocks + num_running)
            ):
                break
            swap = ops.swap([s.kv_id for s in group], "device")
            intents.append(Intent(Kind.SWAP_IN, swap, tuple(group)))
        return intents

    def _admit_intents(self, budget: int) -> list[Intent]:
        intents: list[Intent] = []
        if self._queued is not None:
            return intents
        num_running, num_blocks = self._num_on_device(), 0
        for sequence in self.waiting:
            num_running += sequence.num_continuations
            num_blocks += -(-len(sequence.tokens) // self._block_size_tokens)
            is_head = not intents and (not self._tight or not self.running)
            if budget <= 0 or num_running > self.max_sequences:
                break
            if not is_head and not self._room.fits(num_blocks + num_running):
                break
            sequence.kv_id = self._new_kv_id()
            num_compute = 0 if self.has_states else min(budget, len(sequence.tokens))
            budget -= num_compute
            admit = ops.admit(
                sequence.kv_id,
                sequence.tokens,
                num_compute_tokens=num_compute,
                max_total_tokens=sequence.max_total_tokens,
                wait=is_head,
            )
            intents.append(Intent(Kind.ADMIT, admit, (sequence,)))
        return intents

    def _num_on_device(self) -> int:
        queued = self._queued.num_continuations if self._queued is not None else 0
        return queued + sum(s.num_continuations for s in self.running)

    # Applying.

    def _applied_fork(
        self, intent: Intent, done: OperationResult, failures: Failures, outcome: Outcome
    ) -> None:
        for item, sequence in enumerate(intent.sequences):
            if item not in failures:
                self.stats.num_forks += 1
            elif sequence.status is not SequenceStatus.FINISHED:
                self.running.remove(sequence)
                self.add(sequence)

    def _applied_free(
        self, intent: Intent, done: OperationResult, failures: Failures, outcome: Outcome
    ) -> None:
        for failure in failures.values():
            if not isinstance(failure.error, SequenceNotFoundError):
                raise failure.error

    def _applied_swap_out(
        self, intent: Intent, done: OperationResult, failures: Failures, outcome: Outcome
    ) -> None:
        if failures:
            self._no_swap.update(s.kv_id for s in intent.sequences)
            return
        self.stats.num_swap_preemptions += len(intent.sequences)
        for sequence in intent.sequences:
            self.running.remove(sequence)
            sequence.status = SequenceStatus.SWAPPED
            self.swapped.append(sequence)

    def _applied_swap_in(
        self, intent: Intent, done: OperationResult, failures: Failures, outcome: Outcome
    ) -> None:
        if failures:
            return
        for sequence in intent.sequences:
            if sequence.status is SequenceStatus.FINISHED:
                continue
            self.swapped.remove(sequence)
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)

    def _applied_append(
        self, intent: Intent, done: OperationResult, failures: Failures, outcome: Outcome
    ) -> None:
        num_blocks, checkpoints = done.num_table_blocks, done.checkpoint_positions
        outcome.in_passes |= intent.in_passes
        for item, sequence in enumerate(intent.sequences):
            failure = failures.get(item)
            if sequence.status is SequenceStatus.WAITING:  # its fork failed in this step
                continue
            if failure is None:
                num_slots = intent.num_slots[item]
                ids = intent.kv_ids[item], checkpoints[item] if checkpoints else 0
                self._compute(sequence, sequence.num_computed, num_slots, outcome, *ids)
                sequence.num_sent = intent.num_known[item]
                sequence.num_blocks = num_blocks[item]
            elif sequence.status is SequenceStatus.FINISHED:
                continue
            elif failure.is_later:
                self._blocked.append(sequence)
            else:
                error = failure.error
                if isinstance(error, PositionMismatchError):
                    raise error  # the caller aborts the plan, after which both sides agree
                outcome.failed.append((sequence, error))

    def _applied_admit(
        self, intent: Intent, done: OperationResult, failures: Failures, outcome: Outcome
    ) -> None:
        (sequence,) = intent.sequences
        if not failures:
            admitted = done.admit
            cached, scheduled = admitted.num_cached_tokens, admitted.num_scheduled_tokens
            if sequence.status is not SequenceStatus.FINISHED:  # else the next step frees it
                self._start(sequence, admitted.num_blocks, cached)
            self._compute(sequence, cached, scheduled, outcome)
        elif sequence.status is SequenceStatus.FINISHED:
            return
        elif failures[0].queue_position:
            self._queued = sequence
        else:
            sequence.kv_id = 0
            if not failures[0].is_later:
                outcome.failed.append((sequence, failures[0].error))

    def _granted(self, grant: Granted) -> None:
        sequence = self._queued
        if sequence is not None and sequence.kv_id == grant.sequence_id:
            self._queued = None
            self._start(sequence, grant.num_blocks, grant.num_cached_tokens)

    def _start(self, sequence: EngineSequence, num_blocks: int, num_cached_tokens: int) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.start(num_blocks, num_cached_tokens)

    def _note_cuts(self, news: SessionNews) -> None:
        """Queue sequences that the control plane has cut, to be admitted and computed again."""
        self._asked = set(news.sequences_asked)
        if self._queued is not None and self._queued.kv_id in news.cut:
            self._queued.kv_id, self._queued = 0, None
        for sequence in [s for s in self.running if s.kv_id in news.cut]:
            self.running.remove(sequence)
            self._recompute(sequence)
            self.stats.num_recompute_preemptions += 1

    def _compute(
        self,
        sequence: EngineSequence,
        first: int,
        num_tokens: int,
        outcome: Outcome,
        kv_id: int = 0,
        checkpoint: int = 0,
    ) -> None:
        sequence.num_computed = first + num_tokens
        if num_tokens > 0:
            is_live = sequence.status is not SequenceStatus.FINISHED
            if outcome.in_passes:
                sequence.num_due = num_tokens * is_live
            else:
                sequence.num_due = int(is_live and sequence.num_uncomputed == 0)
            is_due = bool(sequence.num_due)
            outcome.spans.append(Span(sequence, first, num_tokens, is_due, kv_id, checkpoint))

    # Helpers.

    def _recompute(self, sequence: EngineSequence) -> None:
        self._frees.append(sequence.kv_id)
        self._no_swap.discard(sequence.kv_id)
        self.add(sequence)

    def _recompute_swapped(self) -> None:
        """Queue all swapped sequences to be computed again, when none runs or moves: a group that
        swapped out together may never fit together again, but each sequence fits alone.
        """
        self.stats.num_recompute_preemptions += len(self.swapped)
        swapped, self.swapped = self.swapped, []
        for sequence in swapped:
            self._recompute(sequence)


_APPLY: Final = {
    Kind.FORK: Scheduler._applied_fork,
    Kind.FREE: Scheduler._applied_free,
    Kind.SWAP_OUT: Scheduler._applied_swap_out,
    Kind.APPEND: Scheduler._applied_append,
    Kind.SWAP_IN: Scheduler._applied_swap_in,
    Kind.ADMIT: Scheduler._applied_admit,
}
