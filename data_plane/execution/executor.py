"""Runs plans on the pools: the data plane without a server.

    install ──► open ──► start ──► layer, once for each of the shard's layers ──► receipt
    (key)      (grant)   (plan)     writes keys and values, attends

A model runner in the same process calls this class with tensors; the gRPC service is a thin wrapper
around it. Commands run one at a time. One that is refused changes neither tables nor memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from data_plane.execution.commands import Commands, Observer
from data_plane.execution.counters import ExecutorCounters
from data_plane.execution.fixed_step import FixedStep
from data_plane.execution.layer_runner import LayerRunner
from data_plane.execution.plan_runner import PlanLayer, PlanRunner, StartedPlan
from data_plane.execution.shards.shard_kernels import ShardKernels
from data_plane.execution.table_blocks import BlockRange, TableBlocks
from data_plane.kernels.arguments import require
from data_plane.kernels.backend import Kernels, check_cache_kinds, kernels_of
from data_plane.kernels.device.device_watch import DeviceWatch
from data_plane.kernels.device.devices import with_index
from data_plane.memory.pool import Pools
from data_plane.plans.batches.fixed_rows import StepBounds
from data_plane.plans.batches.transfers import Transfers
from data_plane.plans.sessions import Sessions, check_ordinal
from data_plane.plans.tables.block_tables import BlockTables, Parts, block_report
from data_plane.plans.verifier import Verifier
from data_plane.tier_keys import check_group, tier_key_of
from kvplane.attention_options import AttentionOptions
from kvplane.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    NotPermittedError,
)
from kvplane.layout import Layout
from kvplane.shard import Shard
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import types_pb2 as pb


class Executor:
    """One shard's pools and the plans that run on them. Thread-safe.

    Tensors are on the executor's device, [num_tokens, heads of this shard, head_size], of the
    layout's dtype; their last dimension is contiguous, other strides are free. On a GPU, commands
    queue work on the caller's stream; only the command that returns a plan's receipt, or starts the
    next plan, waits for it.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        pool_id: str,
        num_device_blocks: int | Sequence[int],
        num_host_blocks: int | Sequence[int] = 0,
        shard: Shard | None = None,
        device: str | torch.device = "cpu",
        num_threads: int = 0,
        kernels: Kernels | None = None,
        epoch: int = 0,
        observe: Observer | None = None,
    ) -> None:
        """Allocate the pools. ``num_device_blocks`` and ``num_host_blocks``: of each layer group;
        a single number is for each of them. ``num_threads``: of the CPU kernels, 0 for as many as
        torch uses. ``kernels``: None for those of ``device``. ``epoch``: the number of this run,
        higher than that of the process it replaces; 0 takes the clock's nanoseconds.

        Raises InvalidRequestError for a setting out of range, and NeverFitsError for pools that do
        not fit in a GPU's memory or in the host memory beside it.
        """
        require(1 <= len(pool_id) <= 128, "must be 1 to 128 characters", "pool_id")
        shard = shard if shard is not None else Shard.whole(layout)
        self._verifier = Verifier(pool_id, shard.index, shard.num_shards, epoch)
        self.layout, self.shard = layout, shard
        self.layers = self.shard.layers(layout)
        self.device = with_index(torch.device(device))
        self.kernels = kernels if kernels is not None else kernels_of(self.device, num_threads)
        check_cache_kinds(layout, self.kernels)
        self.device_watch = DeviceWatch(self.kernels.streams)
        self.counters = ExecutorCounters()
        self._command = Commands(self.counters, self.device_watch, observe)
        self.pools = Pools(
            layout,
            self.shard,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            device=self.device,
            drain=self.kernels.streams.drain,
        )
        num_blocks = self.pools.num_blocks
        self._tables = BlockTables(
            num_blocks, layout.block_size_tokens, layout.state_group, layout.whole_group
        )
        self._sessions = Sessions()
        self._compute = ShardKernels(
            layout,
            self.shard,
            self.pools,
            self.counters,
            device=self.device,
            kernels=self.kernels,
        )
        self._plans = PlanRunner(
            self._tables,
            self._sessions,
            self._compute,
            self._verifier,
            self.counters,
            layers=self.layers,
            num_state_layers=len(shard.state_layers(layout)),
            check_device=self.device_watch.check,
        )
        self.blocks = TableBlocks(
            layout, shard, self._tables, self._sessions, self._plans, self._compute, self._command
        )
        self.layer_runner = LayerRunner(self._plans, self._compute, self.layers, self._command)

    @property
    def pool_id(self) -> str:
        """Id of the pool that this executor is a shard of."""
        return self._verifier.pool_id

    @property
    def epoch(self) -> int:
        """Number of this run; a later run of the shard has a higher one."""
        return self._verifier.epoch

    @property
    def incarnation(self) -> int:
        """Incarnation of the control plane registered with; 0 before the first registration."""
        return self._verifier.incarnation

    @property
    def key_id(self) -> bytes:
        """Identifier of the pool's key; empty before there is one."""
        return self._verifier.key_id

    @property
    def num_sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    @property
    def num_sequences(self) -> int:
        """Number of sequences with block tables, of all sessions."""
        return self._tables.num_sequences

    def use_own_stream(self) -> None:
        """Give the calling thread its own stream, whose work runs beside the device's
        other work.
        """
        self.kernels.streams.use_own_stream()

    def finish(self, *, raises: bool = False) -> None:
        """Wait until the device has finished all work queued on it. If the device failed, running
        plans have failed too. ``raises``: whether to raise InternalError then, for callers whose
        plan has run.
        """
        with self._command.lock, self._command("finish"):
            self._plans.quiesce(raises=raises)

    def install(self, incarnation: int, key: bytes) -> None:
        """Begin to serve a control plane: install its key, end every session and remove every
        table.

        Generations and publications stay, because the data does. Raises StaleIncarnationError when
        a higher incarnation was seen, and InvalidRequestError for a key of the wrong length.
        """
        with self._command.lock, self._command("install"):
            self._verifier.install(incarnation, key)
            self._plans.quiesce()
            self._sessions.end_all(self.key_id)
            self._tables.drop_all()

    def report(self, blocks_per_part: int = 2048) -> Parts:
        """Return the ``block_report`` of all blocks that were ever allocated, in parts."""
        with self._command.lock, self._command("report"):
            return block_report(self._tables, blocks_per_part)

    def publish(self, publications: plan_pb2.Publications) -> int:
        """Record that blocks are published, ignoring publications of an earlier generation of a
        block. Returns the number recorded.

        Raises InvalidRequestError for a malformed column; nothing is recorded then.
        """
        with self._command.lock, self._command("publish"):
            group = check_group(publications.group, self.layout, "publications.group")
            present = self._tables.generations[tier_key_of(group, pb.TIER_DEVICE)]
            return self._tables.publications[group].keep(publications, present, "publications")

    def withdraw(self, blocks: rpb.WithdrawBlocks) -> int:
        """Remove publications of blocks that still have their generation. Returns how many."""
        with self._command.lock, self._command("withdraw"):
            group = check_group(blocks.group, self.layout, "withdraw.group")
            present = self._tables.generations[tier_key_of(group, pb.TIER_DEVICE)]
            return self._tables.publications[group].withdraw(blocks, present, "withdraw")

    def fence(self, session: pb.SessionRef, ordinal: int) -> None:
        """End a session, open here or not: once this returns, none of its commands runs or will
        ever run again. ``ordinal``: as in its grant. Safe to repeat.

        Raises StaleIncarnationError and InvalidRequestError.
        """
        with self._command.lock, self._command("fence"):
            self._verifier.check_incarnation(session.incarnation, "session.incarnation")
            check_ordinal(ordinal, "ordinal")
            self._plans.quiesce()
            self._sessions.fence(session.session_id, ordinal)
            self._tables.drop_session(session.session_id)

    def open(self, grant: pb.SignedPayload, *, tenant: str | None = None) -> int:
        """Verify a session's grant. Returns the session's id. Safe to repeat. ``tenant``: the
        caller's; None where callers are not authenticated.

        Raises NotPermittedError for another tenant's grant, BadSignatureError, StaleEpochError,
        StaleIncarnationError, SessionExpiredError, LayoutMismatchError and InvalidRequestError.
        """
        with self._command.lock, self._command("open"):
            verified = self._verifier.grant(grant)
            if verified.layout_fingerprint != self.layout.fingerprint:
                raise LayoutMismatchError(
                    "the session was opened with another layout than this pool's",
                    field="grant.layout_fingerprint",
                )
            if tenant is not None and verified.tenant != tenant:
                raise NotPermittedError("the grant is another tenant's", field="grant.tenant")
            return self._sessions.open(verified).id

    def open_pins(self, session_id: int, grant: pb.SignedPayload) -> plan_pb2.PinGrant:
        """Verify the grant to read what an open session has pinned. Raises NotPermittedError for
        another session's, and as ``open`` does.
        """
        with self._command.lock, self._command("open_pins"):
            self._sessions.get(session_id)  # which must not have ended
            verified = self._verifier.pin_grant(grant)
            if verified.session.session_id != session_id:
                raise NotPermittedError("is another session's", field="pin_grant.session")
            return verified

    def is_open(self, session_id: int) -> bool:
        """Return whether the session was opened here and has not ended."""
        return session_id in self._sessions

    def start(
        self,
        session: int | pb.SignedPayload,
        plan: pb.SignedPayload,
        *,
        swaps: bool | None = None,
    ) -> StartedPlan:
        """Verify a plan, change the block tables as it says, and run its transfers.

        ``session``: the id that ``open`` returned, or the grant. ``swaps``: the transfers that the
        plan may have: True for swaps between the tiers, False for copies inside the device tier,
        None for both. Starting a plan that is running lets it continue, and starting one that has
        run returns its receipt again; neither changes the tables. A plan without spans has run when
        this returns. Raises InvalidRequestError naming a transfer of the other kind, and the errors
        listed in the comment of ``ExecutionService`` in ``execution.proto``.
        """
        with self._command.lock, self._command("start"):
            verified, digest = self._verifier.plan(plan)
            if swaps is not None:
                self._check_transfers(verified, swaps=swaps)
            session_id = session if isinstance(session, int) else self.open(session)
            require(
                verified.session.session_id == session_id,
                f"the plan is for session {verified.session.session_id}, not for {session_id}",
                "plan.session.session_id",
            )
            return self._plans.start(self._sessions.get(session_id), verified, digest)

    def begin_pass(self, session_id: int, index: int, *, plan_number: int | None = None) -> int:
        """Compute the latest plan in passes: from here on, layers have token ``index`` of each span
        that is long enough, in the spans' order. Returns the number of those tokens.

        Pass 0 begins before any layer, and each next pass once all layers of the one before are
        written; beginning the present one again changes nothing. The last layer of the last pass
        gives the receipt. So one plan serves as many decode steps as its spans have tokens.
        ``plan_number``: the plan expected to be the latest, None for any. On a GPU, waits until the
        pass before has run, and raises InternalError when the device failed. Raises
        PlanOutOfOrderError, SessionExpiredError, and InvalidRequestError where there is no such
        pass, or a sequence shares blocks that the plan computes for another.
        """
        with self._command.lock, self._command("begin_pass"):
            session, run = self._plans.latest(session_id, plan_number)
            return self._plans.begin_pass(session, run, index)

    def layer(
        self,
        session_id: int,
        layer: int,
        query: torch.Tensor | None,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions = AttentionOptions(),
        plan_number: int,
        pass_index: int | None = None,
    ) -> torch.Tensor | None:
        """Write one layer's keys and values to the slots of the latest plan's spans, then attend
        from these over their sequences. Returns the attention output, None without a query.

        query: [num_tokens, num_heads, head_size], num_heads a multiple of the KV heads; None only
        writes. key, value: [num_tokens, num_kv_heads, head_size], value with value_head_size, or
        None where the layer keeps latents; no key and no value only attend, in a layer that the
        plan has written. The output is [num_tokens, num_heads, value_head_size] of the query's
        dtype. Tensors may also be as transformers has them, [num_rows, heads, num_columns, size],
        with an output of [num_rows, num_columns, num_heads, value_head_size]. ``plan_number`` and
        ``pass_index``: what the layer belongs to, None for a plan that computes all tokens at once.

        Layers are written in ascending order; one that was written may be sent again. Once the plan
        has run, attention is computed and nothing is written. ``receipt`` returns the receipt.
        Raises PlanOutOfOrderError where ``plan_number`` and ``pass_index`` are not the session's
        latest plan and its present pass, InvalidRequestError, BlockNotWritableError,
        SessionExpiredError, StaleGenerationError when a block has been allocated again, and
        InternalError when the device failed.
        """
        named = PlanLayer(session_id, layer, plan_number, pass_index)
        return self.layer_runner.run(named, (query, key, value), options)

    def fixed_step(self, session_id: int, bounds: StepBounds) -> FixedStep:
        """Return a step whose layers can be captured in a CUDA graph, which is then replayed for
        each plan of the session that fits ``bounds``. Device memory is allocated for ``bounds``.

        Raises SessionExpiredError, and InvalidRequestError for kernels that have no graphs and for
        bounds that are out of range.
        """
        with self._command.lock, self._command("fixed_step"):
            session = self._sessions.get(session_id)
            step = FixedStep(
                session_id,
                bounds,
                layout=self.layout,
                layers=self.layers,
                runner=self.layer_runner,
                compute=self._compute,
                device=self.device,
            )
            session.has_fixed_steps = True
        return step

    def receipt(self, session_id: int) -> pb.SignedPayload | None:
        """Return the latest plan's receipt; None while layers are missing. On a GPU, waits until it
        has run. Raises InternalError when the device failed: such a plan gets no receipt.
        """
        with self._command.lock, self._command("receipt"):
            return self._plans.receipt(*self._plans.latest(session_id, None))

    def read_blocks(
        self,
        session_id: int,
        sequence_id: int,
        entries: Sequence[int],
        *,
        group: int = 0,
        first_layer: int = 0,
        num_layers: int = 0,
    ) -> tuple[torch.Tensor, pb.Blocks]:
        """Copy whole blocks out of a sequence's table: ``entries`` of it, counted from 0, in any
        order. Returns the data, and the blocks' tier, indices and generations.

        ``num_layers``: of this shard's layers of the group, from the model's layer ``first_layer``
        on; 0 for all. The data is [num_layers, num_blocks, 2, num_kv_heads, block_size, head_size]
        of the layout's kv_dtype (``BlockService`` says what it is where values are smaller than
        keys, and ``opaque_pages`` what opaque pages are), on the device for the device tier
        and on the CPU for the host tier. Slots that were not written are 0 in it. Raises
        SequenceNotFoundError, InvalidRequestError, SessionExpiredError, BlockNotWrittenError for a
        block of which no slot was written, StaleGenerationError when a block has been allocated
        again, and PlanOutOfOrderError while the latest plan's transfers have not all run.
        """
        place = BlockRange(sequence_id, 0, len(entries), group, first_layer, num_layers)
        return self.blocks.read(session_id, place, entries)

    def write_blocks(
        self,
        session_id: int,
        sequence_id: int,
        first_block: int,
        blocks: torch.Tensor,
        *,
        group: int = 0,
        first_layer: int = 0,
        num_layers: int = 0,
        plan_number: int | None = None,
    ) -> pb.SignedPayload | None:
        """Write the slots of the latest plan's span for a sequence from whole blocks.

        blocks: as ``read_blocks`` returns them, for the table entries from ``first_block`` on;
        ``first_layer`` and ``num_layers`` as there. Only the span's slots are written. Several
        calls may write a span; none may leave a gap after the tokens written before. Returns the
        receipt once nothing is missing. Errors name the table entries as ``entries``. Raises as
        ``layer`` does.
        """
        num_blocks = blocks.shape[1] if blocks.dim() > 1 else 0
        place = BlockRange(sequence_id, first_block, num_blocks, group, first_layer, num_layers)
        return self.blocks.write(session_id, [place], blocks, plan_number)

    def check_integrity(self) -> None:
        """Check that tables, counts, generations and publications agree. Raises InternalError."""
        with self._command.lock:
            self._tables.check_integrity()
            for session_id in self._tables.session_ids():
                self._sessions.get(session_id)

    def _check_transfers(self, plan: plan_pb2.Plan, *, swaps: bool) -> None:
        transfers = Transfers.read(self.pools.num_blocks, plan.transfers)
        is_swap = transfers.sources.tiers != transfers.destinations.tiers
        wrong = np.flatnonzero(is_swap != swaps)
        if len(wrong):
            kinds = "swaps between the tiers", "copies inside the device tier"
            raise InvalidRequestError(
                f"this call runs plans whose transfers are all {kinds[not swaps]}",
                field=f"plan.transfers.destination_tiers[{wrong[0]}]",
            )
