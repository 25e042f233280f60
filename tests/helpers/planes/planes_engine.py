"""An engine: numbers its requests, repeats unanswered ones, runs its plans, checks values.

It knows its own tokens, so it knows what every slot of its sequences must hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from random import Random
from typing import Any

import numpy as np
import torch

from data_plane.execution.table_blocks import BlockRange
from kvplane import ops
from kvplane.errors import (
    BadSignatureError,
    InvalidRequestError,
    KvplaneError,
    PoolNotReadyError,
    SessionNotFoundError,
    StaleError,
    StaleGenerationError,
    TooManyPlansInFlightError,
)
from kvplane.results import SequenceState
from kvplane.slices import run_to_end
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.error_messages import to_wire
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_model import num_cached, observed_state
from tests.helpers.native.native_pool import Span
from tests.helpers.native.native_sessions import Known
from tests.helpers.outcomes import is_refused
from tests.helpers.planes.planes_known import (
    LayerCall,
    Made,
    Pin,
    Sent,
    ShardRun,
    deferred_of,
    extend,
    unseen_cuts,
)  # fmt: skip
from tests.helpers.planes.planes_values import (
    BLOCK,
    Owner,
    Values,
    check_blocks,
    check_read,
    tag_of,
    values_of,
)
from tests.helpers.planes.planes_world import (
    LEASE_S,
    POOL,
    ControlProcess,
    DataProcess,
    World,
    wire,
)

MAX_PASSES = 10
_REFUSALS = (StaleError, BadSignatureError, PoolNotReadyError)

Outcome = tuple[list[cpb.ItemFailure], cpb.AdmitResult]
"""Of an operation of one item: its failure, if it has one, and what was admitted."""


def outcome_of(answer: cpb.StepResponse) -> Outcome:
    (result,) = answer.results
    return list(result.failures), result.admit


def failures_of(error: KvplaneError) -> list[cpb.ItemFailure]:
    """Return the error of a whole request as that of its only item."""
    message = to_wire(error)
    message.ClearField("next_number")  # a check has no number
    return [cpb.ItemFailure(status=cpb.ITEM_STATUS_FAILED, error=message)]


class Engine:
    """One client with one session."""

    def __init__(self, world: World, control: ControlProcess, owner: Owner) -> None:
        """Raises PoolNotReadyError."""
        self.world, self.control, self.owner = world, control, owner
        request = cpb.OpenSessionRequest(
            pool_id=POOL, layout=world.layout.to_proto(), namespace=owner[1], client_name="engine"
        )
        opened = wire(control.core.open_session(request, owner[0]))
        self.ref, self.grant = opened.session, opened.grant
        self.epochs = [info.epoch for info in opened.shards]
        self.key = control.core._pools[POOL].key
        self.num_restarts = control.num_restarts
        self.number = 0
        self.sequences: dict[int, Known] = {}
        self.cut: set[int] = set()  # the queue took these, and their ids were not used since
        self.sent: list[Sent] = []
        self.unanswered: Sent | None = None
        self.given_up: list[Sent] = []
        self.plans: list[Made] = []
        self.newest = [0] * len(self.epochs)  # highest plan started on each shard
        self.present: dict[int, tuple[int, int | None]] = {}  # plan and pass, by shard
        self.receipts: list[tpb.SignedPayload] = []
        self.old_receipts: list[tpb.SignedPayload] = []
        self.old_tokens: list[cpb.DeferredTokens] = []
        self.pins: list[Pin] = []
        self.held: dict[int, Pin] = {}  # by id, not undone
        self.starts: list[tuple[DataProcess, Made]] = []
        self.layer_calls: list[LayerCall] = []
        self.ended = False  # the control plane said so
        self.may_end = False  # it was closed, or its lease ran out

    @property
    def id(self) -> int:
        return self.ref.session_id

    @property
    def tenant(self) -> str:
        return self.owner[0]

    # Requests

    def call(self, method: str, request: Any, rng: Random | None = None) -> Any:
        """Send a request with the next number. With ``rng``, it or its answer may be lost; then,
        and when the session has ended, return None. Raises the error of the whole request.
        """
        assert self.unanswered is None
        self.number += 1
        request.session.CopyFrom(self.ref)
        request.number = self.number
        self.unanswered = Sent(method, request)
        fate = rng.random() if rng is not None else 1.0
        if fate < 0.08:
            return None
        if fate < 0.14:
            self._deliver(self.unanswered)
            self.world.happened["answers lost"] += 1
            return None
        return self.retry()

    def retry(self) -> Any:
        """Send the unanswered request again, and believe the answer."""
        sent = self.unanswered
        assert sent is not None
        self._deliver(sent)
        if self.ended:
            return None
        self.unanswered = None
        self.sent.append(sent)
        if sent.error is not None:
            if isinstance(sent.error, TooManyPlansInFlightError):
                self._believe_past(sent.request)
            raise sent.error
        self._believe_all(sent)
        self.check()
        return sent.answer

    def change_its_mind(self) -> bool:
        """Give up the unanswered request, if it never arrived: its number is used for another one,
        and it may arrive later.
        """
        sent = self.unanswered
        if sent is None or sent.arrived:
            return False
        self.given_up.append(sent)
        self.receipts += sent.request.receipts
        self.unanswered = None
        self.number -= 1
        return True

    def _deliver(self, sent: Sent) -> None:
        core = self.control.core
        sent.arrived = True
        try:
            sent.answer = wire(getattr(core, sent.method)(wire(sent.request), self.tenant))
        except (StaleError, SessionNotFoundError) as error:
            self._was_refused(error)
            sent.error = error
        except KvplaneError as error:
            sent.error = error
        self.control.flush()

    def _was_refused(self, error: KvplaneError) -> None:
        if error.field.startswith("receipts"):
            raise error
        restarted = self.control.num_restarts > self.num_restarts
        assert restarted or self.may_end, f"the session ended for no reason: {error!r}"
        self.ended = True

    def step(
        self,
        *operations: cpb.Operation,
        rng: Random | None = None,
        deferred: bool = True,
        receipts: Sequence[tpb.SignedPayload] | None = None,
    ) -> cpb.StepResponse | None:
        """Send a step, be it of receipts alone; ``receipts`` None for all at hand."""
        request = cpb.StepRequest(operations=operations, receipts=self.take_receipts(receipts))
        if deferred:
            request.deferred_tokens.CopyFrom(self.deferred_tokens())
        response: cpb.StepResponse | None = self.call("step", request, rng)
        return None if response is None else response

    def take_receipts(
        self, receipts: Sequence[tpb.SignedPayload] | None = None
    ) -> list[tpb.SignedPayload]:
        """Take and return receipts to send, all at hand for None."""
        taken = list(self.receipts) if receipts is None else list(receipts)
        self.receipts = [receipt for receipt in self.receipts if receipt not in taken]
        self.old_receipts += taken
        return taken

    def foreseen(self, operation: cpb.Operation) -> Outcome:
        """Return what a check says that a step of this operation would be answered."""
        request = cpb.StepRequest(session=self.ref, operations=[operation], validate_only=True)
        try:
            checked = run_to_end(self.control.core.validate(wire(request), self.tenant))
        except KvplaneError as error:
            return failures_of(error), cpb.AdmitResult()
        return outcome_of(checked)

    def outcome(self, operation: cpb.Operation) -> Outcome | None:
        """Return what a step of this operation alone is answered, None when the session ended."""
        try:
            answer = self.step(operation, deferred=False, receipts=())
        except KvplaneError as error:
            return failures_of(error), cpb.AdmitResult()
        return None if answer is None else outcome_of(answer)

    def close(self) -> None:
        """End the session."""
        self.may_end = self.ended = True
        self.control.core.close_session(wire(self.ref), self.tenant)
        self.control.flush()

    def lookup(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a prompt are cached."""
        return num_cached(self.control.core, self.owner, tokens)

    def deferred_tokens(self) -> cpb.DeferredTokens:
        """Return tokens of computed positions that the control plane was not given yet."""
        late = {i: s for i, s in self.sequences.items() if s.num_known < s.num_scheduled}
        tokens = [s.tokens[s.num_known : s.num_scheduled] for s in late.values()]
        message = ops.deferred_tokens(
            list(late),
            [s.admitted_by for s in late.values()],
            [s.num_known for s in late.values()],
            list(map(len, tokens)),
            ops.pack_tokens(list(chain.from_iterable(tokens))),
        )
        if late:
            self.old_tokens.append(message)
        return message

    # What it believes

    def everything(self) -> tuple[Any, ...]:
        """Return all state that requests of the session could change."""
        return observed_state(self.control.core, self.id)

    def _states(self, ids: list[int]) -> list[Any]:
        core = self.control.core
        if not ids:
            return []
        request = cpb.ListSequencesRequest(session=self.ref, sequence_ids=columns.pack(INT64, ids))
        listed = SequenceState.all_from_proto(core.list_sequences(request, self.tenant).sequences)
        by_id = {state.sequence_id: state for state in listed}
        return [by_id[i] for i in ids]

    def check(self) -> None:
        """Check that the control plane agrees with this engine's view."""
        if (
            self.ended
            or self.unanswered is not None
            or self.id not in self.control.core.sessions.by_id
        ):
            return
        live = self.sequences.keys() - unseen_cuts(self.control.core, self.id)
        for state in self._states(sorted(live)):
            known = self.sequences[state.sequence_id]
            assert state.admitted_by == known.admitted_by
            assert state.num_tokens == known.num_known
            assert state.num_scheduled_tokens == known.num_scheduled
            assert state.tier == known.tier

    def _believe_all(self, sent: Sent) -> None:
        request, answer = sent.request, sent.answer
        self._believe_past(request)
        if sent.method == "step":
            for i in columns.read(INT64, answer.news.cut_sequence_ids, ""):
                self.world.happened["sequences cut"] += self.sequences.pop(i, None) is not None
                self.cut.add(i)
        if sent.method == "abort_plans":
            self._believe_states(answer.sequences)
        if sent.method == "step":
            for operation, result in zip(request.operations, answer.results, strict=True):
                self._believe(operation, result, request.number)
        if answer.HasField("plan"):
            self._made(answer.plan)

    def _believe_past(self, request: Any) -> None:
        if not hasattr(request, "deferred_tokens"):
            return
        for item in deferred_of(request.deferred_tokens):
            known = self.sequences.get(item.sequence_id)
            assert known is not None or item.sequence_id in self.cut
            if known is not None:
                known.num_known = max(known.num_known, item.first + len(item.tokens))

    def _believe(self, operation: cpb.Operation, result: cpb.OperationResult, number: int) -> None:
        kind = operation.WhichOneof("operation")
        failed = {failure.item for failure in result.failures}
        self.world.happened["items not done"] += len(failed)
        if is_refused(result):
            assert failed == {0}
            return
        if kind == "admit":
            done, tokens = result.admit, list(columns.read(INT32, operation.admit.token_ids, ""))
            scheduled = done.num_cached_tokens + done.num_scheduled_tokens
            known = Known(tokens, len(tokens), scheduled, number)
            self.sequences[operation.admit.sequence_id] = known
            self.cut.discard(operation.admit.sequence_id)
            self.world.happened["tokens found cached"] += done.num_cached_tokens
        elif kind == "append":
            extend(self.sequences, operation.append, failed)
        elif kind == "fork":
            parents = columns.read(INT64, operation.fork.parent_sequence_ids, "")
            ids = columns.read(INT64, operation.fork.sequence_ids, "")
            for item, (parent, i) in enumerate(zip(parents, ids, strict=True)):
                if item not in failed:
                    self.cut.discard(i)
                    self.sequences[i] = self.sequences[parent].copy(number)
        elif kind == "free":
            for item, i in enumerate(columns.read(INT64, operation.free.sequence_ids, "")):
                if item not in failed:
                    assert self.sequences.pop(i, None) or i in self.cut
                    self.cut.discard(i)
        elif kind == "pin":
            self._believe_pin(operation.pin, result)
        elif kind == "unpin":
            for i in columns.read(INT64, operation.unpin.pin_ids, ""):
                self.held.pop(i, None)
        elif kind == "truncate":
            ends = columns.read(INT32, operation.truncate.num_tokens, "")
            ids = columns.read(INT64, operation.truncate.sequence_ids, "")
            for item, (i, end) in enumerate(zip(ids, ends, strict=True)):
                if item not in failed:
                    self.sequences[i].truncate(end)
        else:
            for i in columns.read(INT64, operation.swap.sequence_ids, ""):
                self.sequences[i].tier = operation.swap.tier

    def _believe_pin(self, message: cpb.Pin, result: cpb.OperationResult) -> None:
        """Keep the grant of one pin, and until when it holds its blocks."""
        tokens = list(columns.read(INT32, message.token_ids, ""))
        (num_blocks,) = columns.read(INT32, result.num_pinned_blocks, "")
        assert result.HasField("pin_grant") == (num_blocks > 0)
        if num_blocks:
            (pin_id,) = columns.read(INT64, message.pin_ids, "")
            pin = Pin(result.pin_grant, tokens[: num_blocks * BLOCK], self.world.clock.now)
            self.held[pin_id] = pin
            self.pins.append(pin)
            self.world.happened["blocks pinned"] += num_blocks

    def read_pins(self, pin: Pin, index: int, process: DataProcess) -> None:
        """Read what a pin has, or had, at one process of a shard: it is as it was written, or gone.
        While the pin lasts, the process that it is of has it.
        """
        refusal = self.refusal(index, process)
        executor = process.executor
        try:
            executor.open(wire(self.grant))
            grant = executor.open_pins(self.id, wire(pin.grant))
        except _REFUSALS as error:
            assert refusal, f"a pin of session {self.id} is refused: {error!r}"
            return
        assert not refusal, f"pins of {refusal} are read"
        process.opened.add(self.id)
        lasts = (
            pin in self.held.values()
            and self.control is self.world.control
            and self.id in self.control.core.sessions.by_id
            and self.world.clock.now < pin.since_s + LEASE_S
        )
        values = values_of(self.owner, pin.tokens)
        for group in range(len(self.world.layout.attention_groups)):
            wanted = process.view.blocks(values, group)
            for i in range(wanted.shape[1]):
                where = f"session {self.id} pin of {pin.tokens} shard {index} {group=} block {i}"
                try:
                    found = executor.blocks.read_pinned(grant, BlockRange(0, 0, 1, group), [i])
                except StaleGenerationError:
                    assert not lasts, f"{where}: it was taken"
                    self.world.happened["pins that were taken"] += 1
                except InvalidRequestError:
                    assert self.world.layout.groups[group].sliding_window_tokens, where
                else:
                    check_blocks(found.numpy(), wanted[:, i : i + 1], tag_of(self.tenant), where)
                    self.world.happened["pinned blocks read"] += 1

    def _believe_states(self, message: cpb.SequenceStates) -> None:
        states = SequenceState.all_from_proto(message)
        cut = unseen_cuts(self.control.core, self.id)
        assert [state.sequence_id for state in states] == sorted(self.sequences.keys() - cut)
        for state in states:
            known = self.sequences[state.sequence_id]
            reached = state.num_tokens, state.num_scheduled_tokens
            known.tier = state.tier
            if reached == (known.num_known, known.num_scheduled):
                continue
            assert state.num_tokens == state.num_scheduled_tokens <= known.num_scheduled
            known.num_known = known.num_scheduled = state.num_tokens
            del known.tokens[state.num_tokens :]

    def _made(self, signed: tpb.SignedPayload) -> None:
        made = Made(signed, plan_pb2.Plan.FromString(signed.payload), {})
        # The plan of a resync lacks these, and its answer has no news.
        cut = unseen_cuts(self.control.core, self.id) - {span.sequence_id for span in made.spans}
        for i, known in self.sequences.items():
            if known.num_scheduled and i not in cut:
                made.tokens[i] = known.tokens[: known.num_scheduled]
                made.values[i] = values_of(self.owner, made.tokens[i])
        self.plans.append(made)

    # Plans

    def next_plan(self, index: int, *, skip: bool = False) -> Made | None:
        """Return the next plan for a shard; ``skip``: that of the next whole tables."""
        waiting = [
            made
            for made in self.plans
            if made.number >= self.newest[index]
            and not (index in made.runs and made.runs[index].finished)
        ]
        if skip:
            waiting = [made for made in waiting if made.plan.resync] or waiting
        return waiting[0] if waiting else None

    def advance(self, index: int, process: DataProcess, *, skip: bool = False) -> bool:
        """Start the next plan on a shard, or send its next layer. Return whether that was done."""
        made = self.next_plan(index, skip=skip)
        if made is None:
            return False
        run = made.runs.get(index)
        if run is None:
            return self._start(made, index, process)
        return self._layer(made, index, run)

    def run_all(self) -> None:
        """Run every plan on every shard, as far as it is not refused."""
        for index, epoch in enumerate(self.epochs):
            process = self.world.by_epoch.get(epoch)
            while process is not None and self.advance(index, process):
                pass
        self._forget()

    def _forget(self) -> None:
        """Drop plans that no shard will run."""
        self.plans = [
            made
            for made in self.plans
            if any(
                made.number > newest
                or (made.number == newest and not (i in made.runs and made.runs[i].finished))
                for i, newest in enumerate(self.newest)
            )
        ]

    @property
    def is_served(self) -> bool:
        """Whether every shard must run its plans."""
        processes = self.world.by_epoch
        return not self.ended and all(
            epoch in processes and not self.refusal(index, processes[epoch])
            for index, epoch in enumerate(self.epochs)
        )

    def refusal(self, index: int, process: DataProcess) -> str:
        """Return why a data plane must refuse the session's plans; empty when it must not."""
        executor = process.executor
        if process.shard.index != index or executor.epoch != self.epochs[index]:
            return "another process"
        if executor.incarnation != self.ref.incarnation:
            return "another control plane"
        if executor.key_id != signing.key_id(self.key):
            return "another key"
        return "an ended session" if self.id in process.ended else ""

    def _start(self, made: Made, index: int, process: DataProcess) -> bool:
        refusal = self.refusal(index, process)
        executor = process.executor
        try:
            executor.open(wire(self.grant))
            assert not refusal, f"opened, though it is of {refusal}"
            started = executor.start(self.id, wire(made.signed))
        except _REFUSALS as error:
            assert refusal, f"session {self.id} plan {made.number} is refused: {error!r}"
            assert not isinstance(error, StaleGenerationError)
            self.world.happened[f"plans refused: {refusal}"] += 1
            return False
        process.opened.add(self.id)
        self.starts.append((process, made))
        self.newest[index] = made.number
        self.present[index] = made.number, None
        longest = max((span.num for span in made.spans), default=0)
        in_passes = 0 < longest <= MAX_PASSES and (self.id + made.number) % 4 == 0
        run = made.runs[index] = ShardRun(process, in_passes=in_passes)
        self.world.happened["plans started"] += 1
        self._read(made, index, process, before=made.left_of(0))
        if started.receipt is not None:
            self._finish(made, index, run, started.receipt)
        elif process.files is not None and not in_passes:
            self._load(made, index, run)
        return True

    def _load(self, made: Made, index: int, run: ShardRun) -> None:
        """Take what is in files of a started plan's blocks, instead of computing it."""
        files = run.process.files
        assert files is not None
        for i, first, num in made.spans:
            if first % BLOCK or num % BLOCK:
                continue
            token_ids = ops.pack_tokens(made.tokens[i][: first + num])
            before = files.num_loaded
            loaded = files.load(self.id, made.number, i, token_ids)
            self.world.happened["blocks loaded"] += loaded.num_blocks
            num_checkpoints = files.num_loaded - before - loaded.num_blocks
            self.world.happened["checkpoints loaded"] += num_checkpoints
            if loaded.HasField("receipt"):
                self._finish(made, index, run, loaded.receipt)

    def _layer(self, made: Made, index: int, run: ShardRun) -> bool:
        process = run.process
        begins = run.in_passes and run.next_layer in (0, len(process.view.layers))
        if begins and not self._begin_pass(made, index, run):
            return False
        of_pass = run.pass_index
        layer = process.view.layers[run.next_layer]
        query, key, value = self._tensors(made, process, layer, of_pass)
        call = LayerCall(process, made.number, of_pass, layer, query, key, value)
        try:
            number, compute = made.number, partial(process.executor.layer, self.id, layer)
            if number % 2:
                output = compute(query, key, value, plan_number=number, pass_index=of_pass)
            else:
                compute(None, key, value, plan_number=number, pass_index=of_pass)
                output = compute(query, None, None, plan_number=number, pass_index=of_pass)
        except StaleError as error:
            assert self.id in process.ended, f"a layer is refused: {error!r}"
            return False
        assert self.id not in process.ended, "a layer of an ended session was written"
        assert output is not None
        self._check_attention(made, process, layer, of_pass, output)
        self.layer_calls.append(call)
        run.next_layer += 1
        self.world.happened["layers run"] += 1
        if run.next_layer == len(process.view.layers):
            if of_pass is not None and made.spans_of(of_pass + 1):
                assert process.executor.receipt(self.id) is None, "a receipt before the last pass"
                if (made.number + of_pass) % 3 == 0:
                    self._read(made, index, process, before=made.left_of(of_pass + 1))
                self.world.happened["passes run"] += 1
                return True
            self._keep_checkpoints(made, process)
            receipt = process.executor.receipt(self.id)
            assert receipt is not None
            self._finish(made, index, run, receipt)
        return True

    def _begin_pass(self, made: Made, index: int, run: ShardRun) -> bool:
        """Begin the next pass. Return whether it was not refused, as the session has ended."""
        run.pass_index = 0 if run.pass_index is None else run.pass_index + 1
        run.next_layer = 0
        try:
            num = run.process.executor.begin_pass(self.id, run.pass_index, plan_number=made.number)
        except StaleError as error:
            assert self.id in run.process.ended, f"a pass is refused: {error!r}"
            return False
        except InvalidRequestError:
            assert run.pass_index == 0
            assert made.has_readers, "passes are refused for no reason"
            self.world.happened["passes refused"] += 1
            run.in_passes, run.pass_index = False, None
            return True
        assert self.id not in run.process.ended, "a pass of an ended session was begun"
        assert num == len(made.spans_of(run.pass_index))
        self.present[index] = made.number, run.pass_index
        return True

    def _keep_checkpoints(self, made: Made, process: DataProcess) -> None:
        """Write the checkpoints of a plan whose layers have run."""
        group, executor = process.executor.layout.state_group, process.executor
        latest = executor._sessions.get(self.id).latest
        if group is None or latest is None or latest.checkpoints is None or latest.receipt:
            return
        kept = latest.checkpoints
        for i, entry in zip(kept.sequence_ids.tolist(), kept.entries.tolist(), strict=True):
            state = process.view.state(made.values[i][: (entry + 1) * BLOCK])
            place = BlockRange(i, entry, 1, group)
            executor.blocks.write(self.id, [place], state, made.number)
            self.world.happened["checkpoints kept"] += 1

    def _read_states(self, i: int, written: Values, process: DataProcess) -> None:
        """Check each checkpoint of a sequence in what is written: that of its own prefix."""
        group, executor = process.executor.layout.state_group, process.executor
        assert group is not None
        table = executor._tables.of_session(self.id, group).get(i)
        if table is None:
            return
        for entry in np.flatnonzero(table.generations[: len(written) // BLOCK]).tolist():
            found, _ = executor.read_blocks(self.id, i, [entry], group=group)
            wanted = process.view.state(written[: (entry + 1) * BLOCK])
            assert torch.equal(found, wanted), f"sequence {i} has another prefix's state at {entry}"
            self.world.happened["checkpoints read"] += 1

    def _finish(self, made: Made, index: int, run: ShardRun, receipt: tpb.SignedPayload) -> None:
        statement = plan_pb2.Receipt.FromString(receipt.payload)
        assert statement.plan_number == made.number
        assert statement.plan_digest == signing.digest(made.signed.payload)
        run.finished = True
        self.receipts.append(wire(receipt))
        self._read(made, index, run.process)
        self.world.happened["plans run"] += 1

    def _tensors(
        self, made: Made, process: DataProcess, layer: int, of_pass: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spans = made.spans_of(of_pass)
        rows = [made.values[i][first : first + num] for i, first, num in spans]
        values = np.concatenate(rows)
        query = 2 * process.view.layer(values, layer, 1)
        stamps = [made.stamps.setdefault(i, next(self.world.stamps)) for i, _, _ in spans]
        values[..., -2] = np.repeat(stamps, list(map(len, rows)))[:, None, None, None]
        key, value = (process.view.layer(values, layer, kind) for kind in (0, 1))
        return query, key, value

    def _check_attention(
        self,
        made: Made,
        process: DataProcess,
        layer: int,
        of_pass: int | None,
        output: torch.Tensor,
    ) -> None:
        begin = 0
        for i, first, num_tokens in made.spans_of(of_pass):
            found = output[begin : begin + num_tokens].numpy().copy()
            found[..., -2] = 0
            begin += num_tokens
            wanted = process.view.attention(made.values[i][: first + num_tokens], first, layer)
            assert np.allclose(found, wanted, atol=1e-4), (
                f"session {self.id} sequence {i} sees other values than its own in layer {layer} "
                f"of plan {made.number}"
            )

    def _read(
        self,
        made: Made,
        index: int,
        process: DataProcess,
        before: dict[int, Span] | None = None,
    ) -> None:
        """Read every sequence. ``before``: spans whose slots are not written yet."""
        starts = {span.sequence_id: span.first for span in made.spans}
        for i, all_values in made.values.items():
            first = before[i].first if before and i in before else len(all_values)
            values = all_values.copy()
            values[first:] = np.nan
            for j, begin, num_tokens in made.spans if before else ():
                if j == i:
                    continue
                # A prefix that this plan computes in another sequence may be in shared blocks, and
                # is not read before the receipt.
                theirs = made.values[j][begin : begin + num_tokens]
                own = all_values[begin : begin + len(theirs)]
                same = (own == theirs[: len(own)]).all(axis=tuple(range(1, own.ndim)))
                values[begin : begin + len(own)][same] = np.nan
            if self.world.layout.state_group is not None:
                # Those of a plan are written after its layers.
                last = starts.get(i, len(all_values)) if before else len(all_values)
                self._read_states(i, all_values[:last], process)
            for group, of_group in enumerate(self.world.layout.attention_groups):
                window = of_group.sliding_window_tokens
                check_read(
                    process.executor,
                    (self.id, i),
                    process.view.blocks(values, group),
                    tag_of(self.tenant),
                    f"session {self.id} sequence {i} plan {made.number} shard {index} {group=}",
                    group=group,
                    num_unseen=max(0, first - window + 1) // BLOCK if window else 0,
                )
