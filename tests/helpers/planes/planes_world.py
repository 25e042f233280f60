"""Control planes and data planes, the real ones, and the messages in flight between them.

Every message is serialised and parsed again. Streams keep their order, as TCP does; what is on one
that breaks is lost, or arrives late where that is possible.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

import torch
from google.protobuf.message import Message

from control_plane.config import CoreConfig
from control_plane.core import ControlPlane
from control_plane.pools.pool import Pool
from control_plane.pools.publications import publish_message
from data_plane import Executor
from data_plane.tier_keys import tier_key_of
from kvplane.errors import InvalidRequestError, StaleEpochError, StaleIncarnationError
from kvplane.layout import Layout
from kvplane.ops import pack_tokens
from kvplane.shard import Shard
from kvplane.slices import run_to_end
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT32
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import prefix_pb2
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_model import Clock
from tests.helpers.planes.planes_files import ProcessFiles
from tests.helpers.planes.planes_values import (
    LAYOUT,
    NUM_HEADS,
    NUM_LAYERS,
    Owner,
    ShardView,
    check_blocks,
    tag_of,
    values_of,
)
from tests.helpers.planning import registration_messages
from tests.helpers.planning.registration_messages import all_outgoing

POOL = "pool"
LEASE_S = 30.0
MAX_PLANS_IN_FLIGHT = 3
MAX_CONTROLS, MAX_PROCESSES = 3, 6
_BLOCKS_PER_REPORT = 3

AnyMessage = TypeVar("AnyMessage", bound=Message)


def wire(message: AnyMessage) -> AnyMessage:
    """Return the message as its receiver has it."""
    return type(message).FromString(message.SerializeToString())


def cells(shard: tpb.Shard) -> set[tuple[int, int]]:
    """Return the (layer, KV head)s that a shard holds."""
    layers = range(shard.first_layer, shard.first_layer + shard.num_layers)
    heads = range(shard.first_kv_head, shard.first_kv_head + shard.num_kv_heads)
    return set(itertools.product(layers, heads))


class Found(NamedTuple):
    """Contents of a cached block: the numbers of the plans that wrote its slots."""

    group: int
    owner: tuple[str, str]
    prefix: tuple[int, ...]
    stamps: tuple[float, ...]


class Stream:
    """One registration stream. Either end may think it open when the other has left."""

    def __init__(self, control: ControlProcess, process: DataProcess) -> None:
        self.control, self.process = control, process
        self.index, self.epoch = process.shard.index, process.executor.epoch
        self.to_control: deque[rpb.RegisterRequest] = deque()
        self.to_data: deque[rpb.RegisterResponse] = deque()

    @property
    def is_read_by_control(self) -> bool:
        """Whether it was neither superseded nor closed there."""
        return self.control.streams.get(self.index) is self

    @property
    def is_read_by_data(self) -> bool:
        """Whether the data plane has not left it."""
        return self.process.stream is self


class ControlProcess:
    """A control plane: the core, and its registration streams as its server keeps them."""

    def __init__(self, world: World, incarnation: int) -> None:
        self.world = world
        self.core = ControlPlane(
            incarnation=incarnation,
            config=CoreConfig(
                lease_s=LEASE_S,
                max_plans_in_flight=MAX_PLANS_IN_FLIGHT,
                watermark=world.watermark,
                max_retained_share=0.6,
            ),
            clock=world.clock,
            new_session_id=world.new_session_id,
        )
        self.incarnation = incarnation
        self.streams: dict[int, Stream] = {}
        self.forgotten: set[Found] = set()  # here
        self.num_restarts = 0  # registrations that were not resumed: each may end sessions

    @property
    def pool(self) -> Pool | None:
        """The core's state of the pool."""
        return self.core._pools.get(POOL)

    @property
    def ready(self) -> bool:
        """Whether sessions can be opened."""
        return self.pool is not None and self.pool.ready

    def accept(self, hello: rpb.Hello) -> rpb.Welcome:
        """Answer a Hello. A process of a lower epoch than the registered one must be refused."""
        pool = self.pool
        states = pool.shards.states if pool is not None else {}
        known = states.get(hello.shard.index)
        is_outdated = known is not None and known.hello.epoch > hello.epoch
        must_refuse = is_outdated or hello.incarnation > self.incarnation
        if pool is not None and hello.shard.num_shards == pool.shards.num_shards:
            connected = [s.hello.shard for i, s in states.items() if s.connected]
            others = [shard for shard in connected if shard.index != hello.shard.index]
            must_refuse |= any(not cells(shard).isdisjoint(cells(hello.shard)) for shard in others)
        welcome = wire(self.core.register(wire(hello)))
        assert not must_refuse, "a data plane came in that must be refused"
        if not welcome.resumed:
            self.num_restarts += 1
        return welcome

    def open(self, process: DataProcess, hello: rpb.Hello) -> Stream:
        """Open a data plane's stream; its former stream is superseded."""
        welcome = self.accept(hello)
        stream = Stream(self, process)
        self.streams[stream.index] = stream
        stream.to_data.append(rpb.RegisterResponse(welcome=welcome))
        self.flush()
        return stream

    def close(self, stream: Stream) -> None:
        """Let the control plane notice that a stream has ended."""
        if stream.is_read_by_control:
            del self.streams[stream.index]
            self.core.disconnect(POOL, stream.index, stream.epoch)

    def flush(self) -> None:
        """Put the core's messages on their streams."""
        for index, stream in self.streams.items():
            stream.to_data.extend(map(wire, all_outgoing(self.core, POOL, index)))

    def receive(self, stream: Stream) -> None:
        """Read one message of a stream."""
        request = stream.to_control.popleft()
        if not stream.is_read_by_control:
            return
        try:
            if request.HasField("report"):
                self.core.report(POOL, stream.index, stream.epoch, request.report)
                if request.report.last:
                    accepted = rpb.RegisterResponse(report_accepted=rpb.ReportAccepted())
                    stream.to_data.append(accepted)
            elif request.HasField("files_forgotten"):
                done = request.files_forgotten
                self.core.files_forgotten(POOL, stream.index, stream.epoch, done)
            else:
                self.core.fence_done(POOL, stream.index, stream.epoch, request.fence_done)
        except (InvalidRequestError, StaleEpochError):
            self.close(stream)
        self.flush()


class DataProcess:
    """A data plane: the executor, and its registration client."""

    def __init__(
        self, layout: Layout, shard: Shard, epoch: int, num_device: int, num_host: int
    ) -> None:
        """``num_device``: of the first layer group; each further one has two blocks less."""
        self.files: ProcessFiles | None = None
        self.is_dead = False  # another process has its files
        self.shard = shard
        self.num_device = [max(3, num_device - 2 * i) for i in range(len(layout.groups))]
        self.num_host = num_host
        self.executor = Executor(
            layout,
            pool_id=POOL,
            num_device_blocks=self.num_device,
            num_host_blocks=num_host,
            shard=shard,
            num_threads=1,
            epoch=epoch,
        )
        pools = self.executor.pools
        self.tiers = {key: pools.tier(key) for key in pools.num_blocks}
        for tier in self.tiers.values():
            tier.view(torch.uint8).zero_()
        self.view = ShardView(self.executor)
        self.stream: Stream | None = None
        self.opened: set[int] = set()  # sessions that were opened here, ever
        self.ended: set[int] = set()  # and those of them, and of those fenced, that must be refused
        self.hellos: list[rpb.Hello] = []
        self.publications: list[plan_pb2.Publications] = []
        self.fences: list[rpb.Fence] = []  # since the key was installed
        self.fences_done: list[rpb.FenceDone] = []

    def snapshot(self) -> tuple[bytes, ...]:
        """Return all state that commands could change."""
        return (
            *(tier.numpy().tobytes() for tier in self.tiers.values()),
            *(part.SerializeToString(deterministic=True) for part in self.executor.report()),
        )

    def hello(self) -> rpb.Hello:
        executor = self.executor
        groups = [
            rpb.GroupBlocks(num_device_blocks=num, num_host_blocks=self.num_host)
            for num in self.num_device
        ]
        hello = registration_messages.hello(
            pool_id=POOL,
            shard=self.shard.to_proto(),
            epoch=executor.epoch,
            layout=executor.layout.to_proto(),
            num_device_blocks=self.num_device[0],
            num_host_blocks=self.num_host,
            groups=groups if len(groups) > 1 else (),
            has_file_tier=executor.blocks.is_watched,
            address=f"shard{self.shard.index}:1",
            incarnation=executor.incarnation,
            key_id=executor.key_id,
        )
        self.hellos.append(hello)
        return hello

    def receive(self, stream: Stream) -> None:
        """Read one message of the present stream, and answer it."""
        response = stream.to_data.popleft()
        if not stream.is_read_by_data:
            return
        kind = response.WhichOneof("message")
        if kind == "welcome":
            self._begin(stream, response.welcome)
        elif kind == "publish":
            self.executor.publish(response.publish.publications)
            self.publications.append(response.publish.publications)
        elif kind == "withdraw":
            self.executor.withdraw(response.withdraw)
        elif kind == "fence":
            fence = response.fence
            self.executor.fence(fence.session, fence.ordinal)
            self.ended.add(fence.session.session_id)
            self.fences.append(fence)
            done = rpb.FenceDone(session=fence.session)
            self.fences_done.append(done)
            stream.to_control.append(wire(rpb.RegisterRequest(fence_done=done)))
        elif kind == "report_request":
            self.report(stream)
        elif kind == "forget_files" and self.files is not None:
            self.files.forget(response.forget_files)
            done = rpb.FilesForgotten(forget_id=response.forget_files.forget_id)
            stream.to_control.append(wire(rpb.RegisterRequest(files_forgotten=done)))
        else:
            assert kind == "report_accepted", kind

    def _begin(self, stream: Stream, welcome: rpb.Welcome) -> None:
        executor = self.executor
        if welcome.resumed:
            shards = stream.control.core._pools[POOL].shards
            is_resumed = executor.incarnation == welcome.incarnation
            is_resumed &= signing.key_id(shards.key) == executor.key_id
            assert is_resumed or not stream.is_read_by_control, "resumed with another key"
            return
        try:
            executor.install(welcome.incarnation, welcome.key)
        except StaleIncarnationError:
            self.stream = None
            return
        self.ended |= self.opened
        self.fences.clear()
        self.report(stream)

    def report(self, stream: Stream) -> None:
        """Send the contents of all blocks."""
        for part in self.executor.report(_BLOCKS_PER_REPORT):
            stream.to_control.append(wire(rpb.RegisterRequest(report=part)))


class World:
    """All processes, the latest last."""

    def __init__(
        self,
        *,
        num_shards: int = 1,
        by_layers: bool = False,
        layout: Layout = LAYOUT,
        num_device: int = 8,
        num_host: int = 4,
        watermark: float = 0.0,
        num_uses: int = 0,
    ) -> None:
        """``num_uses``: of a prefix until it is written to files; 0 for none."""
        self.clock = Clock()
        self.layout = layout
        self.watermark = watermark
        self.happened: Counter[str] = Counter()
        self.stamps = itertools.count(1)
        self.forgotten: set[Found] = set()  # and withdrawn from all data planes
        self.prefixes: dict[tuple[Owner, tuple[int, ...]], None] = {}  # that were ever cached
        self._num_uses = num_uses
        self._folder = TemporaryDirectory() if num_uses else None
        self._random = Random(1)
        self._epochs = itertools.count(1)
        self.shards = [self._shard(i, num_shards, by_layers) for i in range(num_shards)]
        self.sizes = [(num_device, num_host)] * num_shards
        self.controls: list[ControlProcess] = []
        self.processes: list[DataProcess] = []
        self.restart_control(1)
        for index in range(num_shards):
            self.restart_data(index)
        self.mend()

    def _shard(self, index: int, num_shards: int, by_layers: bool) -> Shard:
        if by_layers:
            num = NUM_LAYERS // num_shards
            return Shard(index, num_shards, index * num, num, 0, NUM_HEADS)
        num = NUM_HEADS // num_shards
        return Shard(index, num_shards, 0, NUM_LAYERS, index * num, num)

    def new_session_id(self) -> int:
        return self._random.randrange(1, 2**53)

    # Processes

    @property
    def by_epoch(self) -> dict[int, DataProcess]:
        return {process.executor.epoch: process for process in self.processes}

    @property
    def control(self) -> ControlProcess:
        """The latest process of the highest incarnation."""
        return max(reversed(self.controls), key=lambda control: control.incarnation)

    def latest(self, index: int) -> DataProcess:
        """Return the last process that is a proper shard of the pool."""
        shard = self.shards[index]
        return next(p for p in reversed(self.processes) if p.shard == shard)

    @property
    def num_device(self) -> int:
        """Number of blocks that each layer group has of the pool that the latest processes make."""
        return min(min(self.latest(i).num_device) for i in range(len(self.shards)))

    def restart_control(self, incarnation: int) -> ControlProcess:
        """Start another control plane; those before it continue."""
        self.controls.append(ControlProcess(self, incarnation))
        if len(self.controls) > MAX_CONTROLS:
            gone = self.controls.pop(0)
            for process in self.processes:
                if process.stream is not None and process.stream.control is gone:
                    process.stream = None
        return self.controls[-1]

    def restart_data(self, index: int, shard: Shard | None = None) -> DataProcess:
        """Start another process of a shard, of a higher epoch; those before it continue."""
        shard = shard or self.shards[index]
        process = DataProcess(self.layout, shard, next(self._epochs), *self.sizes[index])
        if self._folder is not None and shard == self.shards[index]:
            for former in self.processes:
                if former.files is not None and former.shard == shard:
                    former.files.close()
                    former.files, former.stream, former.is_dead = None, None, True
            process.files = ProcessFiles(process.executor, Path(self._folder.name), self._num_uses)
        self.processes.append(process)
        if len(self.processes) > MAX_PROCESSES:
            latest = {id(self.latest(i)) for i in range(len(self.shards))}
            self.leave(gone := next(p for p in self.processes if id(p) not in latest))
            self.processes.remove(gone)
        return process

    # Streams

    def connect(self, process: DataProcess, control: ControlProcess) -> None:
        """Make a process leave its stream for a new one, or be refused."""
        process.stream = None
        if not process.is_dead:
            process.stream = control.open(process, process.hello())

    def close(self) -> None:
        """Let go of all files."""
        for process in self.processes:
            if process.files is not None:
                process.files.close()
                process.files = None
        if self._folder is not None:
            self._folder.cleanup()

    def leave(self, process: DataProcess) -> None:
        """Make a process leave its stream; the control plane knows at once."""
        stream, process.stream = process.stream, None
        if stream is not None:
            stream.control.close(stream)

    def streams(self) -> list[Stream]:
        """Return the streams that an end reads."""
        found = [stream for control in self.controls for stream in control.streams.values()]
        found += [p.stream for p in self.processes if p.stream is not None]
        return list(dict.fromkeys(found))

    def deliver(self, rng: Random, num_messages: int) -> None:
        """Deliver some messages."""
        for _ in range(num_messages):
            waiting = [(s, s.control, s.to_control) for s in self.streams() if s.to_control]
            waiting += [(s, s.process, s.to_data) for s in self.streams() if s.to_data]
            if not waiting:
                return
            stream, receiver, _ = rng.choice(waiting)
            receiver.receive(stream)

    def deliver_all(self) -> None:
        """Deliver all messages, and those that they cause."""
        while any(stream.to_control or stream.to_data for stream in self.streams()):
            for stream in self.streams():
                while stream.to_control:
                    stream.control.receive(stream)
                while stream.to_data:
                    stream.process.receive(stream)

    def mend(self) -> None:
        """Register the latest process of each shard with the latest control plane, and deliver all
        messages in flight. A shard that can't register starts anew.
        """
        control = self.control
        for stream in self.streams():
            if stream.is_read_by_data and stream.process is not self.latest_of(stream):
                self.leave(stream.process)
            if not stream.is_read_by_data:
                stream.control.close(stream)
        for attempt in range(3):
            for index in range(len(self.shards)):
                self._mend_shard(index, control)
            self.deliver_all()
            if control.ready:
                return
            assert attempt < 2, f"the pool is never ready: {control.pool.shards.what_is_missing()}"

    def latest_of(self, stream: Stream) -> DataProcess | None:
        """Return the latest process of a stream's shard."""
        index = stream.index
        return self.latest(index) if index < len(self.shards) else None

    def _mend_shard(self, index: int, control: ControlProcess) -> None:
        process = self.latest(index)
        stream = process.stream
        if stream is not None and stream.control is control and stream.is_read_by_control:
            return
        try:
            self.connect(process, control)
        except StaleEpochError:
            self.connect(self.restart_data(index), control)

    # What always holds

    def check(self) -> None:
        """Check each plane's own invariants, and the contents of blocks that can be found."""
        for process in self.processes:
            process.executor.check_integrity()
            if process.files is not None:
                process.files.tier.files.check_integrity()
        for control in self.controls:
            control.core.check_integrity()
            pool = control.pool
            if pool is not None and pool.built:
                for group in range(len(pool.layout.attention_groups)):
                    self._check_findable(control, pool, group)
                self._check_groups_are_in_step(control, pool)
            if control.ready:
                self._check_all_is_held(control)
                self._check_host_tier(control, pool)

    def _check_all_is_held(self, control: ControlProcess) -> None:
        """Check that each KV head of each layer is held by one shard."""
        infos = control.core.get_pool(POOL).shards
        held = Counter(cell for info in infos for cell in cells(info.shard))
        wanted = itertools.product(range(NUM_LAYERS), range(NUM_HEADS))
        assert held == Counter(wanted), "a pool is ready without all of its parts"

    def _check_groups_are_in_step(self, control: ControlProcess, pool: Pool) -> None:
        """Check that all of a sequence but its blocks is the same in each layer group."""
        for session in control.core.sessions.by_id.values():
            first, *others = (core.states(session.handle, None)[:6] for core in pool.groups)
            assert all(other == first for other in others), "the groups are out of step"

    def _findable(self, pool: Pool, group: int) -> Iterator[tuple[int, tuple[str, str], list[int]]]:
        """Return (block, tenant and namespace, tokens of the prefix) of a group's cached blocks."""
        cached: dict[int, tuple[tuple[str, str], int, list[int]]] = {}
        for run in pool.groups[group].publications_in(0, 1 << 32)[0]:
            message = publish_message(run).publish.publications
            for block, parent, token_ids in zip(
                columns.read(INT32, message.indices, ""),
                columns.read(INT32, message.parent_indices, ""),
                columns.fixed(message.token_ids, 4 * pool.block_size),
                strict=True,
            ):
                owner = (message.tenant, message.namespace)
                cached[block] = owner, parent, list(columns.read(INT32, token_ids, ""))
        for block, (owner, *_) in cached.items():
            prefix: list[int] = []
            at = block
            while at in cached:
                _, at, tokens = cached[at]
                prefix = tokens + prefix
            if at == -1:
                yield block, owner, prefix

    def _processes_of(self, pool: Pool) -> list[DataProcess]:
        """Return the processes that have the pool's key."""
        found = [self.by_epoch.get(epoch) for epoch in pool.epochs]
        key_id = signing.key_id(pool.key)
        return [p for p in found if p is not None and p.executor.key_id == key_id]

    def all_are_connected(self, control: ControlProcess) -> bool:
        """Return whether the control plane reaches the processes of all shards."""
        streams = [stream for stream in self.streams() if stream.control is control]
        both = [s.index for s in streams if s.is_read_by_control and s.is_read_by_data]
        return sorted(both) == list(range(len(self.shards)))

    def findable_contents(self, control: ControlProcess) -> Iterator[Found]:
        """Return what of each cached block the processes of a control plane's pool hold."""
        pool = control.pool
        for group in range(len(pool.layout.attention_groups) if pool is not None else 0):
            for block, owner, prefix in self._findable(pool, group):
                for process in self._processes_of(pool):
                    yield self._contents(process, group, block, owner, prefix)

    def host_contents(self, control: ControlProcess) -> Iterator[Found]:
        """Return what of each block that is cached in the host tier alone the processes hold."""
        if control.ready:
            yield from self._in_host_tier(control, control.pool, self.prefixes)

    def _contents(
        self,
        process: DataProcess,
        group: int,
        block: int,
        owner: tuple[str, str],
        prefix: Sequence[int],
        tier: tpb.Tier = tpb.TIER_DEVICE,
    ) -> Found:
        found = process.tiers[tier_key_of(group, tier)][block]
        return Found(group, owner, tuple(prefix), tuple(found[0, 0, 0, :, -2].tolist()))

    def _check_host_tier(self, control: ControlProcess, pool: Pool) -> None:
        """Check that what was forgotten is not found in the host tier either."""
        forgotten = control.forgotten | (self.forgotten if control is self.control else set())
        prefixes = dict.fromkeys((found.owner, found.prefix) for found in forgotten)
        for contents in self._in_host_tier(control, pool, prefixes):
            assert contents not in forgotten, f"found in the host tier: {contents}"
            self.happened["cached host blocks checked"] += 1

    def _in_host_tier(
        self, control: ControlProcess, pool: Pool, prefixes: Iterable[tuple[Owner, tuple[int, ...]]]
    ) -> Iterator[Found]:
        """Return the contents of prefixes' last blocks that are cached in the host tier alone."""
        for owner, prefix in prefixes:
            request = prefix_pb2.FindPrefixRequest(
                token_ids=pack_tokens(prefix), namespace=owner[1], with_blocks=True
            )
            (match,) = run_to_end(control.core.find_prefix(request, owner[0])).matches
            indices = columns.read(INT32, match.blocks.indices, "")
            if len(indices) * pool.block_size < len(prefix):
                continue
            if match.blocks.tiers[-1] == tpb.TIER_HOST:
                for process in self._processes_of(pool):
                    where = owner, prefix, tpb.TIER_HOST
                    group = pool.groups.index(pool.primary)
                    yield self._contents(process, group, indices[-1], *where)

    def _check_findable(self, control: ControlProcess, pool: Pool, group: int) -> None:
        """Check that the blocks that a prompt would find hold its values, in every shard, and none
        that were forgotten.
        """
        for block, owner, prefix in self._findable(pool, group):
            self.prefixes[owner, tuple(prefix)] = None
            for process in self._processes_of(pool):
                contents = self._contents(process, group, block, owner, prefix)
                assert contents not in control.forgotten, f"found though forgotten: {contents}"
                if control is self.control:
                    assert contents not in self.forgotten, f"found again: {contents}"
                wanted = process.view.blocks(values_of(owner, prefix), group)[:, -1:]
                tier = process.tiers[tier_key_of(group, tpb.TIER_DEVICE)]
                found = tier[block][:, None].numpy()
                where = f"block {block}, found for {owner} {prefix}"
                check_blocks(found, wanted, tag_of(owner[0]), where)
                self.happened["cached blocks checked"] += 1
