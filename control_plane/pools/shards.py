"""The data planes of one pool: their registrations, their reports and the messages to them.

    Hello ──► not resumed ──► asked for its report ──► has reported ──► the pool is built from all
                                   ▲                                    reports, which are dropped
                                   └── another shard restarts ◄─────────────────┘

A report counts only if it was requested on the stream that carries it. Every shard fences a session
that ended: until all have done so, ``is_fencing`` holds and its blocks stay retired.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from control_plane.pools.payload_versions import payload_version
from control_plane.pools.reports import Reports
from kvplane.errors import InvalidRequestError
from kvplane.layout import Layout
from kvplane.shard import Shard, most_kv_heads
from kvplane.wire import signing
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import types_pb2 as tpb

# Most of a tenant's file forgets that shards have not carried out: 1 for each message and for each
# KiB of token ids. Beyond it, all files of the tenant are forgotten instead. A single message may
# be larger: connected shards get it as it is, others a message to forget all the tenant's files.
MAX_WAITING: Final = 1024


@dataclass(eq=False, slots=True)
class EndedSession:
    """A session that has ended and still holds blocks. They are free once all that it held is
    released and every shard has fenced it. ``handle``: of the native core, None if the pool was
    built again since. ``lacks_receipt``: it ended because a shard had not receipted a plan in time.
    """

    ref: tpb.SessionRef
    ordinal: int
    tenant: str
    handle: int | None
    ended_s: float
    unfenced_shards: set[int]
    is_released: bool
    lacks_receipt: bool

    def fence(self) -> rpb.RegisterResponse:
        """Return the message that asks a shard to fence this session."""
        return rpb.RegisterResponse(fence=rpb.Fence(session=self.ref, ordinal=self.ordinal))


class ShardState:
    """State of one data plane: its connection, its report and the messages queued for it."""

    __slots__ = (
        "_has_begun",
        "_index",
        "_reports",
        "asked",
        "complete",
        "connected",
        "hello",
        "outgoing",
        "resends_from",
        "welcomed",
    )

    def __init__(self, hello: rpb.Hello, reports: Reports) -> None:
        self.hello = hello
        self._index = hello.shard.index
        self._reports = reports
        self._has_begun = False  # to report what the pool is to be built from
        self.connected = True
        self.outgoing: deque[rpb.RegisterResponse] = deque()
        self.welcomed = False  # has reported since its last Hello that was not resumed
        self.complete = False  # has reported all that the pool is to be built from
        self.asked = True  # for a report, on the present stream
        # Layer group and device block from which publications are to be sent again.
        self.resends_from: tuple[int, int] | None = None

    def ask_again(self, reports: Reports) -> None:
        """Request another block report from the shard, after the messages queued so far."""
        self._reports = reports
        self.complete = self.asked = self._has_begun = False
        self.outgoing.append(rpb.RegisterResponse(report_request=rpb.ReportRequest()))

    def add_report(self, part: rpb.BlockReport) -> None:
        """Add a part of the shard's report. Raises InvalidRequestError naming a field of
        ``report``; if the part is at fault, the next one begins a new report.
        """
        if self.complete:
            raise InvalidRequestError("is complete: report again when asked to", field="report")
        if not self.asked:
            raise InvalidRequestError("was not asked for on this stream", field="report")
        if not self._has_begun:
            self._reports.start(self._index, num_blocks_of(self.hello))
        self._has_begun = False
        self._reports.add(self._index, num_blocks_of(self.hello), part)
        self._has_begun = True
        if part.last:
            self.complete = self.welcomed = True

    def take_outgoing(self) -> list[rpb.RegisterResponse]:
        """Return the messages to send to the shard, in order, and empty the queue. There are none
        before its first report is complete.
        """
        if not self.welcomed:
            return []
        outgoing = list(self.outgoing)
        self.outgoing.clear()
        self.asked = self.asked or any(message.HasField("report_request") for message in outgoing)
        return outgoing

    def disconnect(self) -> None:
        """Mark the shard as disconnected. Messages that it misses are sent when it comes back."""
        self.connected = False
        self.resends_from = None
        self.outgoing.clear()
        self.asked = False

    def reconnect(self, hello: rpb.Hello, missed: list[rpb.RegisterResponse]) -> None:
        """Mark the shard as connected again, on another stream. ``hello`` may bring a new address.
        Queues ``missed``, then all publications again.
        """
        self.hello, self.connected = hello, True
        self.outgoing = deque(missed)
        self.resends_from = 0, 0
        if not self.complete:
            self.ask_again(self._reports)

    def info(self) -> tpb.ShardInfo:
        """Return the shard's description for clients."""
        hello = self.hello
        return tpb.ShardInfo(
            shard=hello.shard,
            epoch=hello.epoch,
            address=hello.address,
            connected=self.connected,
            has_file_tier=hello.has_file_tier,
        )


class FileForgets:
    """Prefixes of one pool whose files data planes are to delete, until each has confirmed it. The
    pool bounds the number of tenants.

        Forget ──► sent at once ──► (blocks withdrawn) ──► sent again ──► FilesForgotten ──► done

    The second message counts: until blocks are withdrawn, an earlier plan may have them written
    again. It is repeated to a shard that comes back, also as another process, because files outlive
    connections and processes.
    """

    def __init__(self) -> None:
        self._last_id = 0
        self._shards: frozenset[int] = frozenset()  # at the last call of second_notices
        self._early: dict[str, list[rpb.ForgetFiles]] = {}  # sent once, by tenant
        self._waiting: dict[int, tuple[set[int], rpb.ForgetFiles]] = {}
        self._ids: dict[str, set[int]] = {}  # of these, by tenant
        self._sizes: dict[str, int] = {}  # of a tenant's messages, early ones too

    @property
    def has_early(self) -> bool:
        """Says whether messages wait to be sent again, once their blocks are withdrawn."""
        return bool(self._early)

    def is_due(self, tenant: str) -> bool:
        """Return whether a shard may still have files of the tenant that were forgotten."""
        return tenant in self._sizes

    def add(self, message: rpb.ForgetFiles) -> list[rpb.RegisterResponse]:
        """Add a request to delete files; returns what to send at once to shards that keep files."""
        tenant = message.tenant
        held = self._sizes.get(tenant, 0)
        if held and held + _size(message) > MAX_WAITING:
            for forget_id in self._ids.pop(tenant, ()):
                del self._waiting[forget_id]
            self._early.pop(tenant, None)
            self._sizes[tenant] = 0
            message = rpb.ForgetFiles(tenant=tenant, all_namespaces=True)
        self._early.setdefault(tenant, []).append(message)
        self._sizes[tenant] = self._sizes.get(tenant, 0) + _size(message)
        return [_response(message)]

    def second_notices(self, shards: Iterable[int]) -> list[rpb.RegisterResponse]:
        """Return what to send to shards that keep files, once blocks have been withdrawn."""
        of_shards = frozenset(shards)
        if of_shards != self._shards:  # the pool may now be divided in another way
            self._shards = of_shards
            for forget_id, (waiting, _) in [*self._waiting.items()]:
                waiting &= of_shards
                self._drop_if_done(forget_id)
        early, self._early = self._early, {}
        messages = [message for of_tenant in early.values() for message in of_tenant]
        for message in messages:
            self._last_id += 1
            message.forget_id = self._last_id
            self._waiting[self._last_id] = set(of_shards), self._kept(message)
            self._ids.setdefault(message.tenant, set()).add(self._last_id)
            self._drop_if_done(self._last_id)
        return [_response(message) for message in messages]

    def done(self, forget_id: int, shard_index: int) -> None:
        """Record that a shard has confirmed the deletion ``forget_id``."""
        if forget_id in self._waiting:
            self._waiting[forget_id][0].discard(shard_index)
            self._drop_if_done(forget_id)

    def of_shard(self, shard_index: int) -> list[rpb.RegisterResponse]:
        """Return the deletions that a shard has not confirmed."""
        return [
            _response(message)
            for waiting, message in self._waiting.values()
            if shard_index in waiting
        ]

    def _kept(self, message: rpb.ForgetFiles) -> rpb.ForgetFiles:
        """Return the form of the message that is repeated to shards that come back."""
        if _size(message) <= MAX_WAITING:
            return message
        kept = rpb.ForgetFiles(
            forget_id=message.forget_id, tenant=message.tenant, all_namespaces=True
        )
        self._sizes[message.tenant] -= _size(message) - _size(kept)
        return kept

    def _drop_if_done(self, forget_id: int) -> None:
        waiting, message = self._waiting[forget_id]
        if waiting:
            return
        del self._waiting[forget_id]
        tenant = message.tenant
        self._ids[tenant].discard(forget_id)
        self._sizes[tenant] -= _size(message)
        if not self._ids[tenant]:
            del self._ids[tenant]
        if not self._sizes[tenant]:
            del self._sizes[tenant]


def _size(message: rpb.ForgetFiles) -> int:
    return 1 + len(message.token_ids) // 1024


def _response(message: rpb.ForgetFiles) -> rpb.RegisterResponse:
    return rpb.RegisterResponse(forget_files=message)


class PoolShards:
    """The state of each data plane of a pool, and the key that they share."""

    def __init__(
        self, num_shards: int, layout: Layout, new_key: Callable[[], bytes] = signing.new_key
    ) -> None:
        self.num_shards = num_shards
        self.layout = layout
        self._new_key = new_key
        self.key = new_key()
        """Signs plans, grants and receipts."""
        self.reports = Reports(layout, num_shards)
        self.states: dict[int, ShardState] = {}
        self._num_sessions = 0  # opened since the key was made
        self._was_notified = False  # something since the last take_notified
        self.ended: dict[int, EndedSession] = {}
        self.file_forgets = FileForgets()

    def add(self, hello: rpb.Hello) -> ShardState:
        """Register a shard, whose block report is expected next."""
        state = self.states[hello.shard.index] = ShardState(hello, self.reports)
        state.outgoing.extend(self.fences_for(hello.shard.index))
        state.outgoing.extend(self.forgets_for(hello))
        self._was_notified = True
        return state

    def add_report(self, index: int, part: rpb.BlockReport) -> None:
        """Add a part of a shard's report. Raises InvalidRequestError naming a field of it."""
        self.states[index].add_report(part)
        self._was_notified = True

    def reconnect(self, hello: rpb.Hello) -> None:
        """Mark a shard as connected again, on another registration stream."""
        index = hello.shard.index
        self.states[index].reconnect(hello, self.fences_for(index))
        self._was_notified = True

    def ask_again(self, *, but: int) -> None:
        """Request new reports from all shards except one, and drop their earlier reports."""
        self.reports = Reports(self.layout, self.num_shards)
        self._was_notified = True
        for i, state in self.states.items():
            if i != but:
                state.ask_again(self.reports)

    # Queries

    @property
    def are_complete(self) -> bool:
        """Return whether all shards have reported and together hold each KV head of each layer."""
        return self._hold_everything() and all(state.complete for state in self.states.values())

    @property
    def are_connected(self) -> bool:
        """Return whether the registration stream of each registered shard is open."""
        return all(state.connected for state in self.states.values())

    @property
    def has_connected(self) -> bool:
        """Return whether the registration stream of some shard is open."""
        return any(state.connected for state in self.states.values())

    @property
    def is_fencing(self) -> bool:
        """Return whether some shard has not fenced some ended session yet."""
        return any(ended.unfenced_shards for ended in self.ended.values())

    def unfenced(self) -> list[EndedSession]:
        """Return the ended sessions that some shard has not fenced yet."""
        return [ended for ended in self.ended.values() if ended.unfenced_shards]

    @property
    def epochs(self) -> list[int]:
        """Return the epoch of each shard, by shard index. All have registered."""
        return [self.states[i].hello.epoch for i in range(self.num_shards)]

    @property
    def payload_version(self) -> int:
        """The newest payload version that all shards and this control plane know."""
        return payload_version(state.hello for state in self.states.values())

    def infos(self) -> list[tpb.ShardInfo]:
        """Return each shard's description, by shard index."""
        return [self.states[i].info() for i in sorted(self.states)]

    def what_is_missing(self) -> str:
        """Return a text that says why sessions cannot be opened."""
        missing = [str(i) for i in range(self.num_shards) if i not in self.states]
        lost = [str(i) for i, state in sorted(self.states.items()) if not state.connected]
        silent = [str(i) for i, state in sorted(self.states.items()) if not state.complete]
        if missing:
            return f"shards {', '.join(missing)} of {self.num_shards} have not registered"
        if not self._hold_everything():
            return "its shards do not hold every KV head of every layer: correct their ranges"
        if lost:
            return f"shards {', '.join(lost)} have lost their connection"
        if silent:
            return f"shards {', '.join(silent)} have not reported their blocks yet"
        unfenced = sorted({i for ended in self.ended.values() for i in ended.unfenced_shards})
        if not unfenced:
            return "it is still being built from its shards' reports"
        return f"shards {', '.join(map(str, unfenced))} have not stopped sessions that ended yet"

    def overlapping(self, shard: tpb.Shard) -> list[int]:
        """Return the indices of other shards that hold some of the layers and heads that this one
        would, without being copies of it.
        """
        new = Shard.from_proto(shard)
        return [
            i
            for i, state in sorted(self.states.items())
            if i != shard.index and self._overlap(new, Shard.from_proto(state.hello.shard))
        ]

    # Messages

    def take_notified(self) -> list[int]:
        """Return the shards that have queued messages, if any were queued since the last call."""
        if not self._was_notified:
            return []
        self._was_notified = False
        return [i for i, state in self.states.items() if state.outgoing]

    def send(self, messages: list[rpb.RegisterResponse]) -> None:
        """Queue messages for all connected shards. Others get what they missed on resuming."""
        self._was_notified = True
        for state in self.states.values():
            if state.connected:
                state.outgoing.extend(messages)

    @property
    def file_tiers(self) -> list[int]:
        """The indices of the shards that keep blocks in files."""
        return [i for i, state in self.states.items() if state.hello.has_file_tier]

    def forget_files(self, message: rpb.ForgetFiles) -> None:
        """Have shards delete forgotten prefixes' files, now and when ``withdrawn`` is called."""
        if self.file_tiers:
            self._send_to_files(self.file_forgets.add(message))

    def withdrawn(self) -> None:
        """Send the pending deletions of files a second time, after all forgotten blocks were
        withdrawn. A shard that still resumes gets them after its withdrawals, by ``forgets_for``.
        """
        if self.file_forgets.has_early:
            messages = self.file_forgets.second_notices(self.file_tiers)
            self._send_to_files(
                messages, but={i for i, x in self.states.items() if x.resends_from is not None}
            )

    def _send_to_files(
        self, messages: list[rpb.RegisterResponse], but: Collection[int] = ()
    ) -> None:
        self._was_notified = True
        for i in self.file_tiers:
            if self.states[i].connected and i not in but:
                self.states[i].outgoing.extend(messages)

    def forgets_for(self, hello: rpb.Hello) -> list[rpb.RegisterResponse]:
        """Return the deletions of files to send to a resumed shard, after its withdrawals."""
        return self.file_forgets.of_shard(hello.shard.index) if hello.has_file_tier else []

    def fences_for(self, index: int) -> list[rpb.RegisterResponse]:
        """Return the fence messages of sessions that a shard has not fenced yet."""
        return [ended.fence() for ended in self.ended.values() if index in ended.unfenced_shards]

    # Sessions

    def next_ordinal(self) -> int:
        """Return the ordinal of a new session, counted from 1 since the pool's key was made."""
        self._num_sessions += 1
        return self._num_sessions

    def start_over(self, num_shards: int, layout: Layout) -> None:
        """Forget all shards and their unfinished fences, and make a new key."""
        self.num_shards, self.layout = num_shards, layout
        self.key = self._new_key()
        self.states.clear()
        self.reports = Reports(layout, num_shards)
        self.ended.clear()
        self._num_sessions = 0

    # Parts of the pool

    def _hold_everything(self) -> bool:
        """Return whether the shards, which do not overlap, add up to all KV heads of all layers
        and the copies of each part are numbered without gaps.
        """
        if len(self.states) < self.num_shards:
            return False
        shards = [Shard.from_proto(state.hello.shard) for state in self.states.values()]
        num_copies = Counter(shard.part for shard in shards)
        if any(shard.copy >= num_copies[shard.part] for shard in shards):
            return False
        num_held = sum(len(self._layers(x)) * x.num_kv_heads for x in shards if x.copy == 0)
        layers = {x for group in self.layout.groups for x in group.layers}
        return num_held == len(layers) * most_kv_heads(self.layout)

    def _layers(self, shard: Shard) -> set[int]:
        """Return the indices of the model's layers that a shard holds."""
        held = range(shard.first_layer, shard.first_layer + shard.num_layers)
        return {x for group in self.layout.groups for x in group.layers if x in held}

    def _overlap(self, a: Shard, b: Shard) -> bool:
        if a.part == b.part and a.copy != b.copy:
            return False
        share_heads = max(a.first_kv_head, b.first_kv_head) < min(
            a.first_kv_head + a.num_kv_heads, b.first_kv_head + b.num_kv_heads
        )
        return share_heads and not self._layers(a).isdisjoint(self._layers(b))


def num_blocks_of(hello: rpb.Hello) -> list[dict[tpb.Tier, int]]:
    """Return how many blocks a shard has, for each layer group by tier."""
    return [
        {tpb.TIER_DEVICE: group.num_device_blocks, tpb.TIER_HOST: group.num_host_blocks}
        for group in (hello.groups or [hello])
    ]


def total_blocks(hello: rpb.Hello) -> int:
    """Return how many blocks a shard has, summed over layer groups and tiers."""
    return sum(sum(of_group.values()) for of_group in num_blocks_of(hello))
