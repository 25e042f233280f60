"""A naive model of all that is not the core: data planes that hold bytes, engines that know tokens.

A slot's bytes are stood for by the hash of the whole prefix that they were computed from, so a row
that reads its context sees at once whether every slot before it holds exactly its own prefix. The
data plane here checks what a real one must: a wrong plan is an AssertionError, never a refusal.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from control_plane.core import ControlPlane
from control_plane.model import (
    Admit,
    AdmitResult,
    Append,
    BlockRef,
    CoreConfig,
    Fence,
    Fork,
    ForkTable,
    Free,
    Hello,
    LateTokens,
    OpenedSession,
    Operation,
    Outgoing,
    Plan,
    Publication,
    PublishBlocks,
    Receipt,
    ReportedBlock,
    ResyncOutcome,
    SealedPlan,
    SequenceState,
    SetBlocks,
    Shard,
    Status,
    StepOutcome,
    SwapIn,
    SwapOut,
    Tier,
)
from control_plane.prefix_index import chained_hash, root_hash
from kvplane.layout import LayerGroup, Layout

BLOCK = 8
LAYOUT = Layout("model", BLOCK, "float32", "float32", (LayerGroup("full", (0, 1), 2, 8),))
ROOT = 0

Name = tuple[Tier, int]


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as they travel."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def prefix_values(tokens: Sequence[int], start: int = ROOT) -> list[int]:
    """What each position's KV is computed from: all tokens up to it."""
    values, value = [], start
    for token in tokens:
        value = hash((value, token))
        values.append(value)
    return values


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


class DataPlane:
    """One shard's blocks, tables and publications."""

    def __init__(
        self, world: World, index: int, num_shards: int, num_device: int, num_host: int
    ) -> None:
        self.world = world
        self.shard = Shard(index=index, num_shards=num_shards)
        self.sizes = {Tier.DEVICE: num_device, Tier.HOST: num_host}
        self.restart()

    def restart(self) -> None:
        """Another process: nothing is left."""
        self.world.epoch += 1
        self.epoch = self.world.epoch
        self.incarnation = 0
        self.generation: dict[Name, int] = {}
        self.content: dict[Name, list[int | None]] = {}
        self.published: dict[int, Publication] = {}
        self.max_session_id = 0
        self.quit_all()

    def quit_all(self) -> None:
        """Drop every table, as for a new incarnation."""
        self.tables: dict[int, dict[int, list[Name]]] = {}
        self.finished: dict[int, int] = {}
        self.running: dict[int, tuple[int, dict[int, list[Name]]]] = {}
        self.quit: set[int] = set()

    def hello(self) -> Hello:
        return Hello(
            pool_id="pool",
            shard=self.shard,
            epoch=self.epoch,
            layout=self.world.layout,
            num_device_blocks=self.sizes[Tier.DEVICE],
            num_host_blocks=self.sizes[Tier.HOST],
            address=f"shard{self.shard.index}:1",
            incarnation=self.incarnation,
        )

    def join(self) -> bool:
        """Register, and report unless resumed. Returns whether it was resumed."""
        core = self.world.core
        welcome = core.register(self.hello())
        self.incarnation = welcome.incarnation
        if not welcome.resumed:
            self.quit_all()
            blocks = self.report()
            half = len(blocks) // 2
            for part, last in ((blocks[:half], False), (blocks[half:], True)):
                core.report(
                    "pool",
                    self.shard.index,
                    self.epoch,
                    part,
                    last=last,
                    max_session_id=self.max_session_id,
                )
        return welcome.resumed

    def report(self) -> list[ReportedBlock]:
        reported = []
        for (tier, index), generation in self.generation.items():
            publication = self.published.get(index) if tier is Tier.DEVICE else None
            reported.append(ReportedBlock(BlockRef(tier, index, generation), publication))
        return reported

    def leave(self) -> None:
        """The registration stream breaks; what was under way on it is lost."""
        self.world.core.take_outgoing("pool", self.shard.index)
        self.world.core.disconnect("pool", self.shard.index, self.epoch)

    def pump(self) -> None:
        core = self.world.core
        for message in core.take_outgoing("pool", self.shard.index):
            self.take(message)

    def take(self, message: Outgoing) -> None:
        if isinstance(message, Fence):
            self.tables.pop(message.session_id, None)
            self.quit.add(message.session_id)
            self.world.core.fence_done("pool", self.shard.index, self.epoch, message.session_id)
        elif isinstance(message, PublishBlocks):
            for publication in message.publications:
                self._publish(publication)

    def _publish(self, publication: Publication) -> None:
        name = (publication.block.tier, publication.block.index)
        if self.generation.get(name) != publication.block.generation:
            return
        start = ROOT
        if publication.parent_hash:
            start = self.world.values[(publication.tenant, publication.parent_hash)]
        tokens = struct.unpack(f"<{BLOCK}i", publication.token_ids)
        values = prefix_values(tokens, start)
        assert self.content[name] == values, f"{name} was published before it was written"
        assert self.world.values[(publication.tenant, publication.hash)] == values[-1]
        self.published[publication.block.index] = publication

    # Plans

    def started(self, session_id: int) -> int:
        """The session's latest plan that ran, or began to."""
        running = self.running[session_id][0] if session_id in self.running else 0
        return max(running, self.finished.get(session_id, 0))

    def run(self, plan: Plan, expected: dict[int, list[int]], *, halfway: bool = False) -> bool:
        """Run a plan from its start; False when it was refused, or stopped ``halfway``.

        ``expected[sequence]``: the values of all positions up to the end of its row.
        """
        session_id = plan.session_id
        if (
            plan.shard_epochs[self.shard.index] != self.epoch
            or plan.incarnation != self.incarnation
            or session_id in self.quit
        ):
            return False
        last = self.finished.get(session_id, 0)
        if plan.number <= last:
            return plan.number == last
        if not plan.resync and plan.previous != last:
            return False
        again = self.running.get(session_id, (0, {}))
        if again[0] > plan.number:
            return False
        if again[0] == plan.number:
            before = again[1]
        else:
            before = {i: list(t) for i, t in self.tables.get(session_id, {}).items()}
        self.running[session_id] = (plan.number, before)
        self.max_session_id = max(self.max_session_id, session_id)
        self.tables[session_id] = {} if plan.resync else {i: list(t) for i, t in before.items()}
        self._apply(plan, again=again[0] == plan.number)
        for transfer in plan.transfers:
            self._copy(transfer.source, transfer.destination)
        rows = plan.rows[: len(plan.rows) // 2] if halfway else plan.rows
        for row in rows:
            self._compute(plan, row.sequence_id, row.first_position, row.num_tokens, expected)
        if halfway:
            return False
        self.finished[session_id] = plan.number
        return True

    def _apply(self, plan: Plan, *, again: bool) -> None:
        tables = self.tables[plan.session_id]
        for change in plan.changes:
            if isinstance(change, SetBlocks):
                for block, fresh in zip(change.blocks, change.fresh, strict=True):
                    self._check_block(plan.session_id, block, fresh=fresh, again=again)
                names = [(block.tier, block.index) for block in change.blocks]
                table = [] if change.replace else tables.setdefault(change.sequence_id, [])
                assert change.first_block <= len(table), "a table with a hole"
                table[change.first_block : change.first_block + len(names)] = names
                assert len({tier for tier, _ in table}) == 1, "a table in two tiers"
                tables[change.sequence_id] = table
            elif isinstance(change, ForkTable):
                assert change.sequence_id not in tables, "a fork over a live table"
                parent = tables[change.parent_sequence_id]
                assert change.num_blocks <= len(parent)
                tables[change.sequence_id] = parent[: change.num_blocks]
            else:
                del tables[change.sequence_id]

    def _check_block(self, session_id: int, block: BlockRef, *, fresh: bool, again: bool) -> None:
        name = (block.tier, block.index)
        assert block.index < self.sizes[block.tier]
        known = self.generation.get(name, 0)
        if not fresh:
            assert block.generation == known, f"{name} is of generation {known}: {block}"
            return
        if again and block.generation <= known:
            return
        assert block.generation > known, f"{name} is of generation {known}, not new: {block}"
        for other, tables in self.tables.items():
            if other != session_id:
                assert all(name not in table for table in tables.values()), (
                    f"{name} was handed to session {session_id} while session {other} names it"
                )
        self.generation[name] = block.generation
        self.content[name] = [None] * BLOCK
        if block.tier is Tier.DEVICE:
            self.published.pop(block.index, None)

    def _copy(self, source: BlockRef, destination: BlockRef) -> None:
        for block in (source, destination):
            known = self.generation.get((block.tier, block.index))
            assert known == block.generation, f"a transfer of {block}, which is {known}"
        if destination.tier is Tier.DEVICE:
            assert destination.index not in self.published, "a copy over a published block"
        self.content[(destination.tier, destination.index)] = list(
            self.content[(source.tier, source.index)]
        )

    def _compute(
        self,
        plan: Plan,
        sequence_id: int,
        first: int,
        num_tokens: int,
        expected: dict[int, list[int]],
    ) -> None:
        table = self.tables[plan.session_id][sequence_id]
        values = expected[sequence_id]
        for position in range(first):
            name = table[position // BLOCK]
            assert self.content[name][position % BLOCK] == values[position], (
                f"session {plan.session_id} sequence {sequence_id} reads a wrong position "
                f"{position} of {name} in plan {plan.number}"
            )
        for position in range(first, first + num_tokens):
            name = table[position // BLOCK]
            assert name[0] is Tier.DEVICE, "a write to the host tier"
            assert name[1] not in self.published, f"a write to published block {name}"
            self._check_alone(plan.session_id, sequence_id, name)
            self.content[name][position % BLOCK] = values[position]

    def _check_alone(self, session_id: int, sequence_id: int, name: Name) -> None:
        for other, tables in self.tables.items():
            for i, table in tables.items():
                if (other, i) != (session_id, sequence_id):
                    assert name not in table, f"{name} is written while session {other} shares it"


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
            scheduled = done.num_cached_tokens + done.num_scheduled_tokens  # type: ignore[attr-defined]
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
            chained = root_hash(self.tenant)
            for start in range(0, end - BLOCK + 1, BLOCK):
                chained = chained_hash(chained, pack(tokens[start : start + BLOCK]))
                self.world.values[(self.tenant, chained)] = values[start + BLOCK - 1]
        self.queue.append(made)
