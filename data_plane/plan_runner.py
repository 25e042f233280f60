"""Takes plans from their start to their receipt, for the executor, whose lock guards it.

start: tables change ──► blocks are cleared ──► transfers ──► layers ──► receipt
       all or nothing    each part is given to the device once, and a plan that is shown again
                         goes on from where it is
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data_plane.counters import ExecutorCounters
from data_plane.kernels.arguments import WriteArguments
from data_plane.kernels.shard_kernels import Compute
from data_plane.plans.attention_batch import check_writable, prepare_batch
from data_plane.plans.block_tables import BlockTables
from data_plane.plans.last_tenants import LastTenants
from data_plane.plans.progress import Progress
from data_plane.plans.sessions import Run, Session, Sessions
from data_plane.plans.table_changes import apply_changes
from data_plane.plans.transfers import Transfers
from data_plane.plans.verifier import Verifier
from kvplane import columns, signing
from kvplane.errors import InternalError, PlanOutOfOrderError
from kvplane.v1 import types_pb2 as pb


@dataclass(frozen=True, slots=True)
class StartedPlan:
    """A plan that was started, now or before. ``receipt`` when there is nothing left to run;
    ``had_run`` when that was so before it was shown.
    """

    number: int
    num_tokens: int
    num_spans: int
    receipt: pb.SignedPayload | None = None
    had_run: bool = False


class PlanRunner:
    """The plans of all sessions of one executor."""

    def __init__(
        self,
        tables: BlockTables,
        sessions: Sessions,
        compute: Compute,
        verifier: Verifier,
        counters: ExecutorCounters,
        *,
        num_layers: int,
        check_device: Callable[[], None],
    ) -> None:
        """``check_device`` is called when the device has failed, and finds out whether for good."""
        self._tables = tables
        self._tenants = LastTenants(tables.num_blocks)
        self._sessions = sessions
        self._compute = compute
        self._verifier = verifier
        self._counters = counters
        self._num_layers = num_layers
        self._check_device = check_device

    def start(self, session: Session, plan: pb.Plan, payload: bytes) -> StartedPlan:
        """Begin a verified plan, go on with it, or answer what is known of it. ``payload``: the
        bytes that were signed.
        """
        digest = signing.digest(payload)
        if plan.number not in session.receipts:
            self._settle(session, voided=plan.resync)
        known = session.place(plan, digest)
        if isinstance(known, pb.SignedPayload):
            counts = columns.read(columns.INT32, plan.spans.num_tokens, "plan.spans.num_tokens")
            return StartedPlan(plan.number, sum(counts), len(counts), known, had_run=True)
        run = known
        if run is None:
            run = session.latest = self._prepare(session, plan, digest)
            self._counters.num_plans_started += 1
        if not run.transferred:
            self._transfer(session, run)
        receipt = self.receipt(session, run)
        return StartedPlan(run.number, run.batch.num_tokens, run.batch.num_spans, receipt)

    def _prepare(self, session: Session, plan: pb.Plan, digest: bytes) -> Run:
        """Change the tables as a new plan says, all or nothing."""
        tables = self._tables
        transfers = Transfers.read(tables.num_blocks, plan.transfers)
        with tables.transaction():
            allocated = apply_changes(tables, session.id, plan)
            transfers.check_generations(tables, allocated)
            # In the transaction too: a device without memory refuses the plan.
            batch = self._compute.prepare(prepare_batch(tables, session.id, plan.spans))
        return Run(
            number=plan.number,
            digest=digest,
            batch=batch,
            allocated=allocated,
            to_clear=self._tenants.to_clear(session.tenant, allocated, transfers),
            transfers=transfers.batches(),
            progress=Progress(self._num_layers, np.diff(batch.starts)),
            checked_version=tables.publications.version,
        )

    def _transfer(self, session: Session, run: Run) -> None:
        """Give the device what comes before all layers, each part once."""
        if not run.cleared:
            self._compute.clear(run.to_clear)
            run.cleared = True
        while not run.transferred:
            self._compute.transfer(run.transfers[run.num_transfers_given])
            run.num_transfers_given += 1
        # Not before: what was not cleared is another tenant's, also when this plan is voided.
        self._tenants.take_over(session.tenant, run.allocated)

    def write(self, run: Run, arguments: WriteArguments) -> None:
        """Write one layer, unless a block of it was published since the plan started."""
        self.check_still_writable(run)
        self._compute.write(arguments)

    def receipt(self, session: Session, run: Run) -> pb.SignedPayload | None:
        """Sign that a run has ended, once all of it is done and nothing went wrong."""
        if run.receipt is None and run.is_complete and not run.failure:
            self.quiesce()
            if not run.failure:
                session.finish(run, self._verifier.receipt(session.ref, run.number, run.digest))
                self._counters.num_plans_run += 1
        if run.failure:
            raise InternalError(run.failure)
        return run.receipt

    def _settle(self, session: Session, *, voided: bool) -> None:
        """Before another plan: the one that runs is done, or ``voided`` and at least quiet. Then
        nothing reads its batch any more.
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

    def quiesce(self) -> None:
        """Wait for the device. Where it failed, no plan that runs can be said to have done so."""
        try:
            self._compute.finish()
        except InternalError as error:
            for run in self._sessions.running():
                run.failure = error.message
            self._check_device()

    def latest(self, session_id: int, plan_number: int | None) -> tuple[Session, Run]:
        """The session's latest plan, ready for layers. ``plan_number``: which it has to be, None
        for any. Raises SessionExpiredError, PlanOutOfOrderError and, when the device failed under
        it, InternalError.
        """
        session = self._sessions.get(session_id)
        run = session.latest
        if run is None or (plan_number is not None and run.number != plan_number):
            latest = f"its latest is {run.number}" if run is not None else "none was started"
            raise PlanOutOfOrderError(
                f"plan {plan_number} is not the session's latest, {latest}: start it first"
                if plan_number is not None
                else "no plan of the session was started: start one first",
                field="plan.number",
            )
        if run.failure:
            raise InternalError(run.failure)
        run.check_transferred()
        return session, run

    def check_still_writable(self, run: Run) -> None:
        """Look again if anything was published since the plan started."""
        if run.checked_version != self._tables.publications.version:
            check_writable(self._tables, run.batch)
            run.checked_version = self._tables.publications.version
