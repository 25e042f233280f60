"""Carries out plans on the pools: the data plane without a server.

    install ──► open ──► start ──► layer, once for each layer held ──► receipt
    (key)      (grant)   (plan)     writes keys and values, attends

A model runner in the same process calls this class with tensors; the gRPC service is a thin coat
over it. Commands run one at a time, in the order in which they come. One that is refused changes
neither tables nor bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from data_plane.counters import ExecutorCounters
from data_plane.kernels.arguments import WriteArguments, require
from data_plane.kernels.backend import Kernels, kernels_of
from data_plane.kernels.device_watch import DeviceWatch
from data_plane.kernels.devices import with_index
from data_plane.kernels.shard_kernels import Compute
from data_plane.memory.pool import Pools
from data_plane.plans.answers import ExecutorReport, StartedPlan
from data_plane.plans.attention_batch import check_writable, prepare_rows
from data_plane.plans.block_tables import ResidentTables
from data_plane.plans.sessions import Run, Session, Sessions
from data_plane.plans.table_changes import apply_changes
from data_plane.plans.transfers import check_transfers, cut_into_batches
from data_plane.plans.verifier import Authority
from kvplane import signing
from kvplane.attention_options import AttentionOptions
from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    KvplaneError,
    LayoutMismatchError,
    PlanOutOfOrderError,
)
from kvplane.layout import Layout
from kvplane.shard import Shard
from kvplane.v1 import types_pb2 as pb

Observer = Callable[[str, float], None]
"""Told each command's name and duration in seconds."""


class Executor:
    """One shard's pools and the plans that run on them. Thread-safe.

    Tensors are on the executor's device, [num_tokens, heads of this shard, head_size], of the
    layout's dtype, with any strides but a last one of 1. On a GPU what they hold is computed on the
    caller's stream, and only who asks for a receipt, or starts the next plan, waits for it.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        pool_id: str,
        num_device_blocks: int,
        num_host_blocks: int = 0,
        shard: Shard | None = None,
        device: str | torch.device = "cpu",
        num_threads: int = 0,
        kernels: Kernels | None = None,
        observe: Observer | None = None,
    ) -> None:
        """Allocate the pools. ``num_threads``: of the CPU kernels, 0 for as many as torch uses.
        ``kernels``: those to run on; None for those of ``device``.

        Raises InvalidRequestError for a setting out of range, and NeverFitsError for pools that a
        GPU or the host beside it has no room for.
        """
        require(1 <= len(pool_id) <= 128, "must be 1 to 128 characters", "pool_id")
        self.layout = layout
        self.shard = shard if shard is not None else Shard.whole(layout)
        self.layers = self.shard.layers(layout)
        self.device = with_index(torch.device(device))
        self.kernels = kernels if kernels is not None else kernels_of(self.device, num_threads)
        self.device_watch = DeviceWatch(self.kernels.streams)
        self.counters = ExecutorCounters()
        self.pools = Pools(
            layout,
            self.shard,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            device=self.device,
            drain=self.kernels.streams.drain,
        )
        self._authority = Authority(pool_id, self.shard.index, self.shard.num_shards)
        self._tables = ResidentTables(self.pools.num_blocks, layout.block_size_tokens)
        self._sessions = Sessions()
        self._compute = Compute(
            layout,
            self.shard,
            self.pools,
            self.counters,
            device=self.device,
            kernels=self.kernels,
        )
        self._observe = observe
        self._lock = threading.RLock()
        self._depth = 0

    @property
    def pool_id(self) -> str:
        """The pool that this is a shard of."""
        return self._authority.pool_id

    @property
    def epoch(self) -> int:
        """The life of this executor: random, above 0."""
        return self._authority.epoch

    @property
    def incarnation(self) -> int:
        """The control plane's incarnation registered with; 0 before the first."""
        return self._authority.incarnation

    @property
    def num_sessions(self) -> int:
        """Sessions open here."""
        return len(self._sessions)

    @property
    def num_sequences(self) -> int:
        """Resident tables."""
        return self._tables.num_sequences

    @property
    def num_published_blocks(self) -> int:
        """Device blocks that hold something published."""
        return len(self._tables.publications)

    def use_own_stream(self) -> None:
        """Let the calling thread's commands compute beside what others have put on the device."""
        self.kernels.streams.use_own_stream()

    def finish(self) -> None:
        """Wait until the device has done all that it was given."""
        with self._command("finish"):
            self._quiesce()

    def install(self, incarnation: int, key: bytes) -> None:
        """Begin to serve a control plane: running plans stop, every table goes, the key is taken.

        Generations and publications stay, because the bytes do. Raises StaleIncarnationError when a
        higher incarnation was seen.
        """
        with self._command("install"):
            self._authority.install(incarnation, key)
            self._quiesce()
            self._sessions.close_all()
            self._tables.drop_all()

    def report(self) -> ExecutorReport:
        """Generations and published contents of all blocks ever handed out."""
        with self._command("report"):
            return ExecutorReport(list(self._tables.report()), self._sessions.max_session_id)

    def publish(self, publications: Iterable[pb.Publication]) -> int:
        """Keep what blocks hold, beside them. Returns how many were of their block's present
        generation; the others are ignored.

        Raises InvalidRequestError for a malformed one; those before it are kept.
        """
        with self._command("publish"):
            return sum(
                self._tables.publish(publication, f"publications[{i}]")
                for i, publication in enumerate(publications)
            )

    def fence(self, session_id: int) -> None:
        """End a session: when this returns none of its commands runs and none ever will again."""
        with self._command("fence"):
            require(session_id >= 1, "must be above 0", "session_id")
            self._quiesce()
            self._sessions.fence(session_id)
            self._tables.drop_session(session_id)

    def open(self, grant: pb.SignedPayload) -> int:
        """Verify a session's grant. Returns the session's id. Safe to repeat.

        Raises BadSignatureError, StaleEpochError, StaleIncarnationError, SessionExpiredError,
        LayoutMismatchError and InvalidRequestError.
        """
        with self._command("open"):
            verified = self._authority.grant(grant)
            if verified.layout_fingerprint != self.layout.fingerprint:
                raise LayoutMismatchError("is not this pool's", field="grant.layout_fingerprint")
            return self._sessions.open(verified).id

    def start(self, session: int | pb.SignedPayload, plan: pb.SignedPayload) -> StartedPlan:
        """Verify a plan, change the resident tables as it says, and run its transfers.

        ``session``: the id that ``open`` returned, or the grant. A plan that runs already goes on,
        one that has run returns its receipt; neither changes anything. One without rows has run
        when this returns. Raises whatever the service's comment in ``data.proto`` lists.
        """
        with self._command("start"):
            session_id = session if isinstance(session, int) else self.open(session)
            verified = self._authority.plan(plan)
            require(verified.session_id == session_id, "is another session's", "plan.session_id")
            return self._start(self._sessions.get(session_id), verified, plan.payload)

    def write_layer(
        self,
        session_id: int,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        plan_number: int | None = None,
    ) -> pb.SignedPayload | None:
        """Write one layer's keys and values to the slots of the latest plan's rows.

        key, value: [num_tokens, num_kv_heads, head_size]. Returns the receipt if this was the last
        that was missing. ``plan_number`` None stands for the latest plan. Raises
        InvalidRequestError, PlanOutOfOrderError, BlockPublishedError, SessionExpiredError.
        """
        with self._command("write_layer"):
            session, run = self._latest(session_id, plan_number)
            index = self._layer_index(layer)
            arguments = self._compute.write_arguments(run.rows, index, key, value)
            if not run.is_complete:
                self._write(run, arguments)
                run.written[index] = True
            return self._receipt(session, run)

    def attend(
        self,
        session_id: int,
        layer: int,
        query: torch.Tensor,
        *,
        options: AttentionOptions = AttentionOptions(),
        plan_number: int | None = None,
    ) -> torch.Tensor:
        """Attend from the latest plan's rows over their sequences, in a layer that was written.

        query: [num_tokens, num_heads, head_size], num_heads a multiple of the KV heads. The output
        has its shape. Raises as ``write_layer`` does.
        """
        with self._command("attend"):
            _session, run = self._latest(session_id, plan_number)
            index = self._layer_index(layer)
            arguments = self._compute.attention_arguments(run.rows, index, query, options)
            require(bool(run.written[index].all()), "was not written yet", "layer")
            run.used_after_receipt |= run.receipt is not None
            return self._compute.attend(arguments)

    def layer(
        self,
        session_id: int,
        layer: int,
        query: torch.Tensor | None,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        options: AttentionOptions = AttentionOptions(),
        plan_number: int | None = None,
        field: str = "",
    ) -> torch.Tensor | None:
        """``write_layer`` and ``attend`` in one; None without a query. Layers come in ascending
        order, and again from any that was written. ``field`` prefixes the fields that errors name.
        """
        with self._command("layer"):
            _session, run = self._latest(session_id, plan_number)
            require(not run.is_complete, "its plan has run", f"{field}layer")
            index = self._layer_index(layer, field)
            in_order = index == 0 or bool(run.written[index - 1].all())
            require(in_order, "comes before an earlier one", f"{field}layer")
            to_write = self._compute.write_arguments(run.rows, index, key, value, field)
            to_attend = None
            if query is not None:
                to_attend = self._compute.attention_arguments(
                    run.rows, index, query, options, field
                )
            self._write(run, to_write)
            output = None if to_attend is None else self._compute.attend(to_attend)
            run.written[index] = True
            return output

    def receipt(self, session_id: int) -> pb.SignedPayload | None:
        """The latest plan's receipt, once all of it is done, which on a GPU is waited for; None
        while layers are missing. Raises InternalError when the device failed: such a plan gets
        none.
        """
        with self._command("receipt"):
            return self._receipt(*self._latest(session_id, None))

    def start_transfers(
        self, session: int | pb.SignedPayload, plan: pb.SignedPayload, *, swaps: bool
    ) -> tuple[int, pb.SignedPayload | None]:
        """``start`` for a plan whose transfers are all swaps, or all copies within the device tier.

        Returns the number of its transfers and, when it has run, its receipt. Raises
        InvalidRequestError naming the transfer that is of the other kind.
        """
        with self._command("swap_blocks" if swaps else "copy_blocks"):
            transfers = self._authority.plan(plan).transfers
            for i, transfer in enumerate(transfers):
                is_swap = transfer.source.tier != transfer.destination.tier
                wanted = "a swap" if swaps else "a copy within the device tier"
                require(is_swap == swaps, f"is not {wanted}", f"plan.transfers[{i}]")
            return len(transfers), self.start(session, plan).receipt

    def read_blocks(
        self, session_id: int, sequence_id: int, first_block: int, num_blocks: int
    ) -> tuple[torch.Tensor, pb.Blocks]:
        """Whole blocks of a resident table, of either tier, and their names.

        The tensor is [num_layers, num_blocks, 2, num_kv_heads, block_size, head_size] of the
        layout's kv_dtype, on the device or, of the host tier, on the CPU. Raises
        SequenceNotFoundError, InvalidRequestError, SessionExpiredError.
        """
        with self._command("read_blocks"):
            self._sessions.get(session_id)
            table = self._tables.get(session_id, sequence_id, "sequence_id")
            num_left = len(table.blocks) - first_block
            require(first_block >= 0 and num_left > 0, "is outside the table", "first_block")
            require(1 <= num_blocks <= num_left, f"must be 1 to {num_left}", "num_blocks")
            end = first_block + num_blocks
            names = pb.Blocks(
                tier=table.tier,
                indices=table.blocks[first_block:end],
                generations=table.generations[first_block:end],
            )
            return self._compute.read(table.tier, names.indices), names

    def write_blocks(
        self,
        session_id: int,
        sequence_id: int,
        first_block: int,
        blocks: torch.Tensor,
        *,
        plan_number: int | None = None,
    ) -> pb.SignedPayload | None:
        """Write the slots of the latest plan's row for a sequence, in all layers.

        blocks: as ``read_blocks`` returns them; table entries from ``first_block`` on, which must
        cover the row. Returns the receipt if this was the last that was missing. Raises as
        ``write_layer`` does.
        """
        with self._command("write_blocks"):
            session, run = self._latest(session_id, plan_number)
            require(sequence_id in run.rows.sequence_ids, "is in no row", "sequence_id")
            row = run.rows.sequence_ids.index(sequence_id)
            self._compute.check_blocks(run.rows, row, first_block, blocks)
            if not run.is_complete:
                self._check_still_writable(run)
                self._compute.write_row(run.rows, row, first_block, blocks)
                run.written[:, row] = True
            return self._receipt(session, run)

    def check_integrity(self) -> None:
        """Raise InternalError unless tables, counts, generations and publications agree."""
        with self._lock:
            self._tables.check_integrity()
            for session_id in self._tables.session_ids():
                self._sessions.get(session_id)

    def _start(self, session: Session, plan: pb.Plan, payload: bytes) -> StartedPlan:
        digest = signing.digest(payload)
        num_rows = len(plan.rows)
        if plan.number not in session.receipts:
            self._settle(session, voided=plan.resync)
        known = session.place(plan, digest)
        if isinstance(known, pb.SignedPayload):
            num_tokens = sum(row.num_tokens for row in plan.rows)
            return StartedPlan(plan.number, num_tokens, num_rows, known, had_run=True)
        run = known
        if run is None:
            with self._tables.transaction():
                handed_out = apply_changes(self._tables, session.id, plan)
                check_transfers(self._tables, plan, handed_out)
                # In the transaction too: a device without memory refuses the plan.
                rows = self._compute.prepare(prepare_rows(self._tables, session.id, plan))
                batches = cut_into_batches(plan.transfers)
            run = Run(
                number=plan.number,
                digest=digest,
                rows=rows,
                batches=batches,
                written=torch.zeros((len(self.layers), num_rows), dtype=torch.bool),
                checked_version=self._tables.publication_version,
            )
            session.latest = run
            self.counters.num_plans_started += 1
        while not run.transferred:
            self._compute.transfer(run.batches[run.num_batches_given])
            run.num_batches_given += 1
        receipt = self._receipt(session, run)
        return StartedPlan(run.number, run.rows.num_tokens, num_rows, receipt)

    def _write(self, run: Run, arguments: WriteArguments) -> None:
        self._check_still_writable(run)
        self._compute.write(arguments)

    def _receipt(self, session: Session, run: Run) -> pb.SignedPayload | None:
        """Sign that a run has ended, once all of it is done and nothing went wrong."""
        if run.receipt is None and run.is_complete and not run.failure:
            self._quiesce()
            if not run.failure:
                session.finish(run, self._authority.receipt(session.id, run.number, run.digest))
                self.counters.num_plans_run += 1
        if run.failure:
            raise InternalError(run.failure)
        return run.receipt

    def _settle(self, session: Session, *, voided: bool) -> None:
        """Before another plan: the one that runs is done, or ``voided`` and at least quiet. Then
        nothing reads its rows any more.
        """
        if session.latest is not None and session.latest.used_after_receipt:
            self._quiesce()
        run = session.running
        if run is None:
            return
        if voided:
            self._quiesce()
        if not (voided and run.failure):
            self._receipt(session, run)

    def _quiesce(self) -> None:
        """Wait for the device. Where it failed, no plan that runs can be said to have done so."""
        try:
            self._compute.finish()
        except InternalError as error:
            for run in self._sessions.running():
                run.failure = error.message
            self.device_watch.check()

    def _latest(self, session_id: int, plan_number: int | None) -> tuple[Session, Run]:
        session = self._sessions.get(session_id)
        run = session.latest
        if run is None or (plan_number is not None and run.number != plan_number):
            raise PlanOutOfOrderError("the plan is not the session's latest", field="plan.number")
        if run.failure:
            raise InternalError(run.failure)
        if not run.transferred:
            raise PlanOutOfOrderError(
                "its transfers have not all run: start it again", field="plan.number"
            )
        return session, run

    def _check_still_writable(self, run: Run) -> None:
        """Look again if anything was published since the plan started."""
        if run.checked_version != self._tables.publication_version:
            check_writable(self._tables, run.rows.written_blocks)
            run.checked_version = self._tables.publication_version

    def _layer_index(self, layer: int, prefix: str = "") -> int:
        if layer not in self.layers:
            raise InvalidRequestError("is not held here", field=f"{prefix}layer")
        return self.layers.index(layer)

    @contextmanager
    def _command(self, name: str) -> Iterator[None]:
        """Run alone. What is refused is counted once, by the outermost command."""
        with self._lock:
            begin = time.perf_counter()
            self._depth += 1
            try:
                yield
            except KvplaneError as error:
                if self._depth == 1:
                    self.counters.num_rejections[error.reason] += 1
                    if isinstance(error, InternalError):
                        self.device_watch.check()
                raise
            finally:
                self._depth -= 1
                if self._observe is not None:
                    self._observe(name, time.perf_counter() - begin)
