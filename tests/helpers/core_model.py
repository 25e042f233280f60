"""A naive model of all that is not the core: the world around it, and engines that know tokens."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from core_data_plane import BLOCK, LAYOUT, DataPlane, Name, pack, prefix_values

from control_plane.blocks.prefix_index import chained_hash, root_hash
from control_plane.planning.core import ControlPlane
from control_plane.planning.model import (
    Admit,
    AdmitResult,
    Append,
    CoreConfig,
    Fork,
    Free,
    LateTokens,
    OpenedSession,
    Operation,
    Plan,
    Receipt,
    ResyncOutcome,
    SealedPlan,
    SequenceState,
    Status,
    StepOutcome,
    SwapIn,
    SwapOut,
    Tier,
)
from control_plane.planning.publish import root_of
from kvplane.layout import Layout


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """One core and the data planes of one pool."""

    def __init__(
        self,
        *,
        num_shards: int = 1,
        num_device: int = 16,
        num_host: int = 8,
        config: CoreConfig | None = None,
        layout: Layout = LAYOUT,
    ) -> None:
        self.clock = Clock()
        self.config = config or CoreConfig(watermark=0.0)
        self.plans: dict[bytes, Plan] = {}
        self.layout = layout
        # What the last slot of a hashed prefix is computed from.
        self.values: dict[tuple[str, bytes], int] = {}
        self.incarnation = 1
        self.core = self._core()
        self.epoch = 100
        self.shards = [
            DataPlane(self, i, num_shards, num_device, num_host) for i in range(num_shards)
        ]
        for shard in self.shards:
            shard.join()

    def _core(self) -> ControlPlane:
        return ControlPlane(
            incarnation=self.incarnation, config=self.config, clock=self.clock, seal=self.seal
        )

    def seal(self, key: bytes, plan: Plan) -> SealedPlan:
        payload = repr(plan).encode()
        digest = hashlib.sha256(key + payload).digest()
        self.plans[digest] = plan
        return SealedPlan(payload, b"signature", digest)

    def restart_control_plane(self) -> None:
        """Another process with a higher incarnation; every shard registers and reports."""
        self.incarnation += 1
        self.core = self._core()
        for shard in self.shards:
            shard.join()

    def pump(self) -> None:
        """Deliver to every data plane all that waits for it, and its answers."""
        for shard in self.shards:
            shard.pump()

    def engine(self, tenant: str = "tenant") -> Engine:
        """A new engine with an open session."""
        return Engine(self, tenant)

    def usage(self, tier: Tier = Tier.DEVICE) -> dict[str, int]:
        """Blocks of a tier by state."""
        for usage in self.core.describe_pool("pool").usage:
            if usage.tier is tier:
                return {
                    "free": usage.num_free_blocks,
                    "cached": usage.num_cached_blocks,
                    "held": usage.num_held_blocks,
                    "limbo": usage.num_limbo_blocks,
                    "reserved": usage.num_reserved_blocks,
                }
        raise AssertionError(tier)


@dataclass
class ModelSequence:
    """What an engine knows of a sequence. ``truth``: its tokens, also those not yet told."""

    truth: list[int]
    num_known: int
    num_scheduled: int
    tier: Tier = Tier.DEVICE


@dataclass
class MadePlan:
    """A plan as an engine got it, and what its rows compute."""

    plan: Plan
    digest: bytes
    expected: dict[int, list[int]] = field(default_factory=dict)
    ran_on: set[int] = field(default_factory=set)


class Engine:
    """One client: numbers its steps, runs its plans in order, keeps its receipts."""

    def __init__(self, world: World, tenant: str) -> None:
        self.world = world
        self.tenant = tenant
        self.opened: OpenedSession = world.core.open_session("pool", LAYOUT.fingerprint, tenant)
        self.id = self.opened.session_id
        self.number = 0
        self.sequences: dict[int, ModelSequence] = {}
        self.queue: list[MadePlan] = []
        self.receipts: list[Receipt] = []
        self.last: tuple[tuple[Operation, ...], tuple[Receipt, ...], StepOutcome] | None = None

    def step(
        self, *operations: Operation, receipts: Sequence[Receipt] = (), late: bool = False
    ) -> StepOutcome:
        """Send the next step, and believe its answer."""
        number = self.number + 1
        late_tokens = self.late_tokens() if late else ()
        outcome = self.world.core.step(
            self.id,
            self.tenant,
            number,
            operations,
            receipts,
            late_tokens,
            content=str(number).encode(),
        )
        self.number = number
        for tokens in late_tokens:
            sequence = self.sequences[tokens.sequence_id]
            sequence.num_known = tokens.first_position + len(tokens.token_ids) // 4
        for operation, result in zip(operations, outcome.results, strict=True):
            if result.status is Status.OK:
                self._believe(operation, result.done)
        self.last = (operations, tuple(receipts), outcome)
        self._made(outcome.plan)
        return outcome

    def send(self, *operations: Operation) -> StepOutcome:
        """A step with all receipts and late tokens at hand; then run its plan."""
        receipts, self.receipts = self.receipts, []
        outcome = self.step(*operations, receipts=receipts, late=True)
        self.run_all()
        return outcome

    def admit(self, sequence_id: int, tokens: Sequence[int], **options: object) -> StepOutcome:
        """Admit, run, and hand in the receipt."""
        outcome = self.send(Admit(sequence_id, pack(tokens), **options))  # type: ignore[arg-type]
        self.settle()
        return outcome

    def cached(self, sequence_id: int, tokens: Sequence[int]) -> int:
        """Admit, and say how many tokens were found cached."""
        done = self.admit(sequence_id, tokens).results[0].done
        assert isinstance(done, AdmitResult)
        return done.num_cached_tokens

    def renew(self) -> None:
        """Renew the lease."""
        self.world.core.renew_session(self.id, self.tenant)

    def append(self, sequence_id: int, *tokens: int, num_slots: int | None = None) -> StepOutcome:
        """Append known tokens, run, and hand in the receipt."""
        slots = len(tokens) if num_slots is None else num_slots
        outcome = self.send(Append(sequence_id, pack(tokens), slots))
        self.settle()
        return outcome

    def settle(self) -> None:
        """Hand in all receipts and late tokens, without a step."""
        receipts, self.receipts = self.receipts, []
        self.submit(receipts, self.late_tokens())

    def submit(self, receipts: Sequence[Receipt], late_tokens: Sequence[LateTokens] = ()) -> None:
        """A step of number 0."""
        core = self.world.core
        core.step(self.id, self.tenant, 0, (), receipts, late_tokens, content=b"")
        for tokens in late_tokens:
            sequence = self.sequences[tokens.sequence_id]
            sequence.num_known = tokens.first_position + len(tokens.token_ids) // 4

    def late_tokens(self) -> tuple[LateTokens, ...]:
        """Tokens of computed positions that the core was not told yet."""
        return tuple(
            LateTokens(i, s.num_known, pack(s.truth[s.num_known : s.num_scheduled]))
            for i, s in self.sequences.items()
            if s.num_known < s.num_scheduled
        )

    def run_next(self, shard: int = 0, *, halfway: bool = False, skip: bool = False) -> None:
        """Run the next plan of the queue on a shard; ``skip``: go to the next whole tables."""
        waiting = [made for made in self.queue if shard not in made.ran_on]
        if skip:
            resyncs = [i for i, made in enumerate(waiting) if made.plan.resync]
            waiting = waiting[resyncs[0] :] if resyncs else waiting
        if not waiting:
            return
        made, plane = waiting[0], self.world.shards[shard]
        if plane.run(made.plan, made.expected, halfway=halfway):
            made.ran_on.add(shard)
            self.receipts.append(self.receipt(made, shard))
        elif made.plan.number < plane.started(self.id):
            made.ran_on.add(shard)  # passed over by whole tables

    def run_all(self) -> None:
        """Run every plan of the queue on every shard."""
        for shard in range(len(self.world.shards)):
            for _ in range(len(self.queue)):
                self.run_next(shard)
        self.queue = [m for m in self.queue if len(m.ran_on) < len(self.world.shards)]

    def receipt(self, made: MadePlan, shard: int = 0) -> Receipt:
        """The shard's word that the plan ran."""
        plane = self.world.shards[shard]
        return Receipt(
            session_id=self.id,
            plan_number=made.plan.number,
            plan_digest=made.digest,
            shard_index=shard,
            epoch=plane.epoch,
            incarnation=plane.incarnation,
        )

    def abort(self, plan_number: int) -> None:
        """Give up a plan, and believe what is left."""
        states = self.world.core.abort_plan(self.id, self.tenant, plan_number)
        self._believe_states(states)

    def resync(self) -> ResyncOutcome:
        """Ask for whole tables."""
        number = self.number + 1
        outcome = self.world.core.resync(self.id, self.tenant, number, content=str(number).encode())
        self.number = number
        self.last = None
        self._believe_states(outcome.sequences)
        self._made(outcome.plan)
        return outcome

    def close(self) -> None:
        """End the session."""
        self.world.core.close_session(self.id, self.tenant)

    def table(self, sequence_id: int) -> list[Name]:
        """The core's table of a sequence."""
        blocks, _ = self.world.core.block_table(self.id, self.tenant, sequence_id)
        return [(block.tier, block.index) for block in blocks]

    def state(self, sequence_id: int) -> SequenceState:
        """The core's state of a sequence."""
        return self.world.core.describe_sequence(self.id, self.tenant, sequence_id)

    def check(self) -> None:
        """The core knows what this engine believes, and shards that are up to date agree."""
        for i, sequence in self.sequences.items():
            state = self.state(i)
            assert state.num_tokens == sequence.num_known
            assert state.num_scheduled_tokens == sequence.num_scheduled
            assert state.tier is sequence.tier
        number = self.queue[-1].plan.number if self.queue else None
        for plane in self.world.shards:
            if number is not None and plane.finished.get(self.id) == number:
                names = {i: self.table(i) for i in self.sequences if self.table(i)}
                if self.is_current(plane):
                    assert plane.tables[self.id] == names

    def is_current(self, plane: DataPlane) -> bool:
        """Whether no abort waits to be told to the data plane."""
        session = self.world.core._sessions[self.id]
        return not session.resync_due and session.last_plan == plane.finished.get(self.id)

    def _believe(self, operation: Operation, done: object) -> None:
        sequences = self.sequences
        if isinstance(operation, Admit):
            tokens = list(struct.unpack(f"<{len(operation.token_ids) // 4}i", operation.token_ids))
            assert isinstance(done, AdmitResult)
            scheduled = done.num_cached_tokens + done.num_scheduled_tokens
            sequences[operation.sequence_id] = ModelSequence(tokens, len(tokens), scheduled)
        elif isinstance(operation, Append):
            sequence = sequences[operation.sequence_id]
            tokens = list(struct.unpack(f"<{len(operation.token_ids) // 4}i", operation.token_ids))
            end = sequence.num_known + len(tokens)
            sequence.truth[sequence.num_known : end] = tokens
            sequence.num_known = end
            sequence.num_scheduled += operation.num_slots
            # Tokens of slots beyond those known: this engine knows them first.
            while len(sequence.truth) < sequence.num_scheduled:
                sequence.truth.append(len(sequence.truth) % 2)
        elif isinstance(operation, Fork):
            parent = sequences[operation.parent_sequence_id]
            sequences[operation.sequence_id] = ModelSequence(
                list(parent.truth), parent.num_known, parent.num_scheduled, parent.tier
            )
        elif isinstance(operation, Free):
            del sequences[operation.sequence_id]
        elif isinstance(operation, SwapOut | SwapIn):
            for i in operation.sequence_ids:
                sequences[i].tier = Tier.HOST if isinstance(operation, SwapOut) else Tier.DEVICE

    def _believe_states(self, states: Sequence[SequenceState]) -> None:
        assert {state.sequence_id for state in states} == set(self.sequences)
        for state in states:
            sequence = self.sequences[state.sequence_id]
            assert state.num_tokens == state.num_scheduled_tokens == state.num_written_tokens
            sequence.num_known = sequence.num_scheduled = state.num_tokens
            del sequence.truth[state.num_tokens :]
            sequence.tier = state.tier

    def _made(self, sealed: SealedPlan | None) -> None:
        if sealed is None:
            return
        plan = self.world.plans[sealed.digest]
        made = MadePlan(plan, sealed.digest)
        for row in plan.rows:
            end = row.first_position + row.num_tokens
            tokens = self.sequences[row.sequence_id].truth[:end]
            made.expected[row.sequence_id] = values = prefix_values(tokens)
            chained = root_hash(root_of(self.tenant))
            for start in range(0, end - BLOCK + 1, BLOCK):
                chained = chained_hash(chained, pack(tokens[start : start + BLOCK]))
                self.world.values[(self.tenant, chained)] = values[start + BLOCK - 1]
        self.queue.append(made)
