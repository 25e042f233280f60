"""Runs plans from their start to their receipt, under the executor's lock.

start: tables change ──► blocks are cleared ──► transfers ──► layers ──► receipt
       all or nothing    each part is queued on the device once; a plan that is started again
                         continues where it stopped
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_plane.execution.counters import ExecutorCounters
from data_plane.execution.shards.shard_kernels import ShardKernels
from data_plane.kernels.arguments import require
from data_plane.plans.batches.attention_batch import (
    AttentionBatch,
    prepare_batch,
)
from data_plane.plans.batches.checkpoints import Checkpoints, prepare_checkpoints
from data_plane.plans.batches.transfers import Transfers, num_copied_and_swapped
from data_plane.plans.contents.last_tenants import LastTenants
from data_plane.plans.contents.reused_blocks import ReusedBlocks
from data_plane.plans.contents.written_slots import WrittenSlots
from data_plane.plans.progress import Progress
from data_plane.plans.sessions import RunningPlan, Session, Sessions
from data_plane.plans.tables.block_tables import BlockTables, Table
from data_plane.plans.tables.table_changes import apply_changes
from data_plane.plans.verifier import Verifier
from data_plane.plans.write_checks import WriteChecks, check_writable
from data_plane.tier_keys import tier_key_of
from kvplane import tracing
from kvplane.errors import (
    BlockNotWrittenError,
    InternalError,
    InvalidRequestError,
    PlanOutOfOrderError,
)
from kvplane.wire import columns
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as pb


@dataclass(frozen=True, slots=True)
class StartedPlan:
    """Result of starting a plan. ``receipt``: None until the plan has run. ``had_run``: whether it
    had run before this call. ``pass_index``: the pass that it is in; None where all tokens are
    computed at once. ``num_copied_blocks`` and ``num_swapped_blocks``: blocks that its transfers
    copy inside the device tier, and swap between the tiers.
    """

    number: int
    num_tokens: int
    num_spans: int
    receipt: pb.SignedPayload | None = None
    had_run: bool = False
    pass_index: int | None = None
    num_copied_blocks: int = 0
    num_swapped_blocks: int = 0


class PlanLayer(NamedTuple):
    """Names a layer of the model, the plan that it belongs to and the pass. The plan has to be the
    session's latest one and the pass its present one; None for all tokens at once. ``field``
    prefixes the names of fields in errors.
    """

    session_id: int
    layer: int
    plan_number: int
    pass_index: int | None = None
    field: str = ""


class PlanRunner:
    """Runs the plans of all sessions of one executor."""

    def __init__(
        self,
        tables: BlockTables,
        sessions: Sessions,
        compute: ShardKernels,
        verifier: Verifier,
        counters: ExecutorCounters,
        *,
        layers: Sequence[int],
        num_state_layers: int,
        check_device: Callable[[], None],
    ) -> None:
        """``num_state_layers``: layers of the shard that keep states. ``check_device`` is called
        after the device failed, to find out whether for good.
        """
        self._tables = tables
        self.write_checks = WriteChecks(tables)
        self._tenants = LastTenants(tables.num_blocks)
        self._written = WrittenSlots(tables)
        self._sessions = sessions
        self._compute = compute
        self._verifier = verifier
        self._counters = counters
        self._layers = layers
        self._num_state_layers = num_state_layers
        self._check_device = check_device
        self.reused: ReusedBlocks | None = None
        """Notes which prefixes are found, for a file tier; None without one."""

    def start(self, session: Session, plan: plan_pb2.Plan, digest: bytes) -> StartedPlan:
        """Begin a verified plan, continue it, or return its receipt if it has run. ``digest``: of
        the bytes that were signed.
        """
        if plan.number not in session.receipts:
            self._settle(session, voided=plan.resync)
        known = session.continued(plan, digest)
        if isinstance(known, pb.SignedPayload):
            counts = columns.read(columns.INT32, plan.spans.num_tokens, "plan.spans.num_tokens")
            latest = session.latest
            of_pass = latest.pass_index if latest and latest.number == plan.number else None
            return StartedPlan(
                plan.number,
                sum(counts),
                len(counts),
                known,
                True,
                of_pass,
                *num_copied_and_swapped(plan.transfers),
            )
        run = known
        if run is None:
            run = session.latest = self._prepare(session, plan, digest)
            self._counters.num_plans_started += 1
            if run.num_tokens:
                self._counters.batch_tokens.add(run.num_tokens)
                self._counters.batch_spans.add(run.num_spans)
        if not run.transferred:
            self._transfer(session, run)
        return StartedPlan(
            run.number,
            run.num_tokens,
            run.num_spans,
            self.receipt(session, run),
            False,
            run.pass_index,
            *num_copied_and_swapped(plan.transfers),
        )

    def _prepare(self, session: Session, plan: plan_pb2.Plan, digest: bytes) -> RunningPlan:
        """Verify a new plan against the tables and apply its table changes, all or none."""
        tables = self._tables
        transfers = Transfers.read(tables.num_blocks, plan.transfers)
        of_sources = self._written.of_sources(transfers)
        with tables.transaction():
            allocated = apply_changes(tables, session.id, plan)
            transfers.check_generations(tables, allocated)
            on_host = tuple(
                prepare_batch(tables, session.id, plan.spans, group)
                for group in range(tables.num_groups)
                if group != tables.state_group
            )
            checkpoints = prepare_checkpoints(
                tables, session.id, on_host[0], self._num_state_layers
            )
            writes: tuple[AttentionBatch | Checkpoints, ...] = on_host
            if checkpoints is not None:
                writes = (*on_host, checkpoints)
            changed = _changed_ids(plan.changes, tables.num_groups)
            for batch, changed_ids in zip(writes, changed, strict=True):
                check_writable(tables, session.id, batch, np.frombuffer(changed_ids, "<i8"))
            attention = on_host
            if not session.has_fixed_steps:
                # In the transaction too: without device memory for it the plan is refused.
                attention = tuple(map(self._compute.prepare, on_host))
        if self.reused is not None:
            self.reused.note(plan, transfers)
        return RunningPlan(
            number=plan.number,
            payload_version=plan.version,
            digest=digest,
            whole=on_host,
            attention=attention,
            on_host=on_host,
            allocated=allocated,
            to_clear=self._tenants.to_clear(session.tenant, allocated, transfers),
            transfers=transfers,
            batches=transfers.batches(),
            of_sources=of_sources,
            to_write=self._written.to_write(writes),
            checkpoints=checkpoints,
            skips_files=plan.skips_files,
            progress=Progress(len(self._layers), np.diff(on_host[0].starts)),
            checked_version=tables.num_messages_published,
            checked_taken=tables.num_taken,
            span=tracing.begin(
                "kvplane.data_plane.plan",
                plan.traceparent,
                "SERVER",
                session=session.id,
                number=plan.number,
            ),
        )

    def _transfer(self, session: Session, run: RunningPlan) -> None:
        """Queue the plan's clearing and transfers on the device, each part once."""
        before, after = run.to_clear
        if not run.cleared:
            self._compute.clear(before)
            run.cleared = True
        while run.num_batches_queued < len(run.batches):
            self._compute.transfer(run.batches[run.num_batches_queued])
            run.num_batches_queued += 1
        self._compute.clear(after)
        run.transferred = True
        # Not earlier: a block that was not cleared holds another tenant's data, even if this plan
        # is voided.
        self._tenants.take_over(session.tenant, run.allocated, run.transfers)
        self._written.copy(run.transfers, run.of_sources)

    def num_readable(
        self,
        run: RunningPlan | None,
        sequence_id: int,
        group: int,
        layers: Sequence[int],
        part: Table,
        entries: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Return [num_blocks]: how many leading slots of each entry of ``part`` were written in
        ``layers`` of the model. ``part`` is ``entries`` of the sequence's table.
        ``run``: the session's latest plan. Raises BlockNotWrittenError for an entry without any.
        """
        num_tokens = 0
        if run is not None and run.receipt is None and group != self._tables.state_group:
            batch = run.whole[group]
            spans = np.flatnonzero(batch.sequence_ids == sequence_id).tolist()
            if spans and (num_new := run.num_written([*map(self._layers.index, layers)], spans[0])):
                num_tokens = int(batch.first_positions[spans[0]]) + num_new
        counts = self._written.of_table(part, entries, num_tokens)
        if not counts.all():
            place = int((counts == 0).argmax())
            raise BlockNotWrittenError(
                f"nothing was written yet to entry {entries[place]} of the table of sequence "
                f"{sequence_id}: a session reads only slots that it wrote or found cached",
                field=f"entries[{place}]",
            )
        return counts

    def begin_pass(self, session: Session, run: RunningPlan, index: int) -> int:
        """Begin a pass of the plan, once the device has done all of the one before, or stay in it.
        Returns how many tokens it computes. Raises PlanOutOfOrderError, InternalError when the
        device failed, and InvalidRequestError for a plan that has no such pass, or of which a span
        reads what another writes.
        """
        require(
            0 <= index < run.num_passes,
            f"must be 0 to {run.num_passes - 1}: the plan's longest span has {run.num_passes} "
            "tokens",
            "pass_index",
        )
        run.check_next_pass(index)
        if index != run.pass_index:
            if index == 0:
                self._check_no_span_reads_another(session, run)
            self.quiesce(raises=True)
            run.begin_pass(index)
            if not session.has_fixed_steps:
                run.attention = tuple(map(self._compute.prepare, run.on_host))
        return run.on_host[0].num_tokens

    def _check_no_span_reads_another(self, session: Session, run: RunningPlan) -> None:
        """Raise InvalidRequestError where a pass would read what the plan writes later."""
        for batch in run.whole if run.num_spans > 1 else ():
            num_blocks = self._tables.num_blocks[tier_key_of(batch.group, pb.TIER_DEVICE)]
            size = self._tables.block_size_tokens
            spans, entries = np.nonzero(batch.reads_of_others(num_blocks, size))
            if not len(spans):
                continue
            tables, ids = self._tables.of_session(session.id, batch.group), batch.sequence_ids
            trimmed = [tables[i].num_trimmed for i in ids.tolist()]
            readers = spans[entries >= np.array(trimmed)[spans]]
            if len(readers):
                raise InvalidRequestError(
                    f"sequence {ids[readers[0]]} shares blocks that the plan computes for another "
                    "sequence: compute all tokens at once",
                    field="pass_index",
                )

    def batch(self, run: RunningPlan, group: int) -> AttentionBatch:
        """Return the plan's batch for a layer group, with its tensors on the kernels' device."""
        if run.attention is run.on_host:
            run.attention = tuple(map(self._compute.prepare, run.on_host))
        return run.attention[group]

    def check_may_run(
        self, named: PlanLayer, index: int, *, writes: bool, attends: bool
    ) -> tuple[RunningPlan, bool]:
        """Return the session's latest plan if its layer ``index`` may run now, and whether it may
        write: a plan that has run writes nothing, and attends again. This is where every
        layer is checked, before each of its slices: the keys of a late one of another plan or pass
        would be written to the slots of the present one. ``index``: of the layer in the shard.
        ``writes``, ``attends``: what the layer does.

        Raises as ``latest``; PlanOutOfOrderError for another pass; InvalidRequestError for a layer
        whose turn it is not; BlockNotWritableError if a block to be written was published since the
        plan started; StaleGenerationError if a block of the spans' tables was allocated again.
        """
        field = named.field
        session, run = self.latest(named.session_id, named.plan_number, f"{field}plan_number")
        run.check_pass(named.pass_index, f"{field}pass_index")
        if not writes:
            require(
                run.progress.is_written(index),
                f"layer {self._layers[index]} of the plan has not been written yet: write it first",
                f"{field}layer",
            )
        elif index and not run.progress.is_written(index - 1):
            raise InvalidRequestError(
                f"layer {self._layers[index - 1]} of the plan comes before layer "
                f"{self._layers[index]}: send it first",
                field=f"{field}layer",
            )
        if writes and not run.is_complete:
            self.write_checks.check_may_write(session, run)
            return run, True
        if attends:
            self.write_checks.check_still_current(session, run)
            run.used_after_receipt |= run.receipt is not None
        return run, False

    def receipt(self, session: Session, run: RunningPlan) -> pb.SignedPayload | None:
        """Return the run's receipt, signed once the device has done all of it; None while something
        is missing. Waits for the device if all of the plan or pass is queued. Raises InternalError
        when the device failed.
        """
        if run.receipt is None and run.is_queued and not run.failure:
            self.quiesce()
            if run.is_complete and not run.failure:
                self._written.add(run.to_write)
                receipt = self._verifier.receipt(
                    session.ref, run.number, run.digest, version=run.payload_version
                )
                session.finish(run, receipt)
                self._counters.num_plans_run += 1
                tracing.end(run.span, tokens=run.num_tokens, sequences=run.num_spans)
        if run.failure:
            raise InternalError(run.failure)
        return run.receipt

    def _settle(self, session: Session, *, voided: bool) -> None:
        """Wait until the device no longer reads the latest plan's batch, and sign its receipt if it
        is complete. Called before another plan starts. ``voided``: whether that one voids it.
        """
        if session.latest is not None and session.latest.used_after_receipt:
            self.quiesce()
        run = session.running
        if run is None:
            return
        if voided:
            self.quiesce()
        if not (voided and run.failure):
            self.receipt(session, run)
        if voided:
            tracing.end(run.span, "the plan was voided")

    def quiesce(self, *, raises: bool = False) -> None:
        """Wait until the device has finished all queued work. If it failed, every running plan
        fails, because it is not known whose work was lost; with ``raises`` InternalError is raised
        then.
        """
        try:
            self._compute.finish()
        except InternalError as error:
            for run in self._sessions.running():
                run.failure = error.message
                tracing.end(run.span, error.message)
            self._check_device()
            if raises:
                raise

    def latest(
        self, session_id: int, plan_number: int | None, field: str = "plan.number"
    ) -> tuple[Session, RunningPlan]:
        """Return the session and its latest plan, ready for layers. ``plan_number``: the one that
        it has to be, None for any. Raises SessionExpiredError, PlanOutOfOrderError naming ``field``
        and, when the device failed while the plan ran, InternalError.
        """
        session = self._sessions.get(session_id)
        run = session.latest
        if run is None:
            raise PlanOutOfOrderError(
                "the session has not started a plan: start one first", field=field
            )
        if plan_number is not None and run.number != plan_number:
            is_over = plan_number < run.number
            raise PlanOutOfOrderError(
                f"is of plan {plan_number}, but the session's latest plan is {run.number}: "
                + (f"plan {plan_number} is over" if is_over else f"start plan {plan_number} first"),
                field=field,
            )
        if run.failure:
            raise InternalError(run.failure)
        run.check_transferred()
        return session, run


def _changed_ids(changes: plan_pb2.TableChanges, num_groups: int) -> list[bytes]:
    """Return, for each layer group, the ids of the sequences whose tables change."""
    if num_groups == 1:
        return [changes.sequence_ids]
    ids = np.frombuffer(changes.sequence_ids, "<i8")
    groups = np.frombuffer(changes.groups or bytes(len(ids)), np.uint8)
    return [ids[groups == group].tobytes() for group in range(num_groups)]
