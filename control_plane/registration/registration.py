"""Registration: data planes register, report, disconnect and return; pools are built from reports.

A shard belongs to the latest process that claimed it: epochs rise, and one that is lower than the
registered one is refused. A process that returns is resumed when nothing that both sides hold has
changed. Otherwise all sessions of the pool end, every other shard fences them and reports again,
and the pool is built again.

Metadata is soft state: the process with the memory has its metadata too. So a pool is built from
reports of which block holds which prefix; the native core does it, a slice at a time
(``csrc/blocks/recovery/rebuild.h``).

- Generations continue from the highest that any shard or this control plane knows of a block, also
  for blocks that the smallest shard does not have: it may be replaced by a larger one.
- A publication is restored only if it is of the block's final generation and all shards report the
  same, since a block holds its prefix only where every shard holds its part of it.
- Its parent is exactly the block that it names, of that block's final generation, and restored too.
  Equal hashes never join blocks, and one whose hash does not follow from its tokens is left out.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Final

from control_plane import limits
from control_plane.config import CoreConfig
from control_plane.pools.layouts import served_layout
from control_plane.pools.payload_versions import payload_version
from control_plane.pools.pool import Pool
from control_plane.pools.shards import PoolShards, ShardState, total_blocks
from control_plane.sessions.sessions import Sessions
from kvplane.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    PoolNotFoundError,
    ProtocolMismatchError,
    QuotaExceededError,
    StaleEpochError,
    StaleIncarnationError,
)
from kvplane.layout import Layout
from kvplane.release import release
from kvplane.shard import Shard, most_kv_heads
from kvplane.wire import signing
from kvplane.wire.plane.v1 import registration_pb2 as rpb

MAX_POOL_ID_CHARACTERS: Final = 128
MAX_ADDRESS_CHARACTERS: Final = 512
MAX_VERSION_CHARACTERS: Final = 128
MAX_BLOCKS: Final = 2**24
MAX_SHARDS: Final = 1024
_KEY_ID_BYTES: Final = (0, 16)


# Blocks of one slice of a build: a millisecond or two.
_SLICE_BLOCKS: Final = 4096
# Pools of shards that have no more blocks are built at once.
_SMALL_BLOCKS: Final = 4096


class Registration:
    """Handles the registration messages of data planes, for all pools."""

    def __init__(
        self,
        pools: dict[str, Pool],
        sessions: Sessions,
        *,
        config: CoreConfig,
        new_key: Callable[[], bytes],
    ) -> None:
        self._pools = pools
        self._sessions = sessions
        self._config = config
        self._new_key = new_key
        self.touched: set[Pool] = set()  # may have new messages, announcements or work
        self._working: set[Pool] = set()  # have work that is done in slices
        self._announcing: set[Pool] = set()  # have something to announce

    def register(self, hello: rpb.Hello) -> rpb.Welcome:
        """Register a shard, or resume it if its process was registered before. A shard that is not
        resumed must report next.

        Raises InvalidRequestError, LayoutMismatchError, ProtocolMismatchError,
        StaleIncarnationError (it has seen a later control plane than this one), StaleEpochError (a
        later process holds the shard), QuotaExceededError.
        """
        layout = _validate(hello)
        welcome = rpb.Welcome(
            incarnation=self._sessions.incarnation,
            version=release(),
            payload_version=payload_version([hello]),
        )
        if hello.incarnation > self._sessions.incarnation:
            raise StaleIncarnationError(
                f"the data plane has registered with incarnation {hello.incarnation}, this control "
                f"plane has {self._sessions.incarnation}: register with the later one",
                field="hello.incarnation",
            )
        self._check_total_blocks(hello)
        pool = self._pools.get(hello.pool_id)
        if pool is None:
            if len(self._pools) >= limits.MAX_POOLS:
                raise QuotaExceededError(
                    f"{len(self._pools)} pools are known, the most: one without data planes is "
                    f"forgotten after {limits.POOL_EXPIRY_S:g} s",
                    field="hello.pool_id",
                )
            shards = PoolShards(hello.shard.num_shards, layout, self._new_key)
            pool = self._pools[hello.pool_id] = Pool(hello.pool_id, shards, self._config)
        elif self._can_resume(pool, hello):
            self.touched.add(pool)
            pool.shards.reconnect(hello)
            welcome.resumed = True
            return welcome
        else:
            self._restart(pool, hello, layout)
        self.touched.add(pool)
        pool.shards.add(hello)
        welcome.key = pool.key
        return welcome

    def _check_total_blocks(self, hello: rpb.Hello) -> None:
        others = (
            state.hello
            for pool in self._pools.values()
            for i, state in pool.shards.states.items()
            if (pool.id, i) != (hello.pool_id, hello.shard.index)
        )
        left = self._config.max_blocks - sum(map(total_blocks, others))
        if total_blocks(hello) > left:
            raise QuotaExceededError(
                f"the data plane has {total_blocks(hello)} blocks, and this control plane has room "
                f"for {left} more: start it with a higher --max-blocks",
                field="hello.num_device_blocks",
            )

    def holds_key(self, hello: rpb.Hello) -> bool:
        """Return whether a Hello proves, by its epoch and key, that its process is registered."""
        pool = self._pools.get(hello.pool_id)
        state = None if pool is None else pool.shards.states.get(hello.shard.index)
        return (
            pool is not None
            and state is not None
            and state.hello.epoch == hello.epoch
            and _holds(hello, pool)
        )

    def report(self, pool_id: str, shard_index: int, epoch: int, report: rpb.BlockReport) -> None:
        """Add a part of a shard's report.

        Raises PoolNotFoundError, StaleEpochError, InvalidRequestError.
        """
        pool, _ = self._shard(pool_id, shard_index, epoch)
        self.touched.add(pool)
        pool.shards.add_report(shard_index, report)
        begin_if_complete(pool)

    def disconnect(self, pool_id: str, shard_index: int, epoch: int) -> None:
        """Record that a shard's stream has ended. Sessions continue: engines carry their plans."""
        pool = self._pools.get(pool_id)
        state = pool.shards.states.get(shard_index) if pool is not None else None
        if state is not None and state.hello.epoch == epoch:
            state.disconnect()

    def forget_lost_pools(self, now_s: float) -> list[str]:
        """Forget the pools that have had no connected data plane, open session or watcher for
        ``POOL_EXPIRY_S``; returns their ids. ``now_s``: monotonic seconds.
        """
        forgotten = []
        for pool in [*self._pools.values()]:
            if self._sessions.of(pool) or pool.watchers or pool.shards.has_connected:
                pool.abandoned_s = None
            elif pool.abandoned_s is None:
                pool.abandoned_s = now_s
            elif now_s - pool.abandoned_s >= limits.POOL_EXPIRY_S:
                del self._pools[pool.id]
                self.touched.discard(pool)
                self._working.discard(pool)
                self._announcing.discard(pool)
                forgotten.append(pool.id)
        return forgotten

    def fence_done(self, pool_id: str, shard_index: int, epoch: int, done: rpb.FenceDone) -> None:
        """Record that a shard has fenced a session. Raises PoolNotFoundError, StaleEpochError."""
        pool, _ = self._shard(pool_id, shard_index, epoch)
        if done.session.incarnation == self._sessions.incarnation:
            self.touched.add(pool)
            self._sessions.fenced(pool, shard_index, [done.session.session_id])
            begin_if_complete(pool)

    def files_forgotten(
        self, pool_id: str, shard_index: int, epoch: int, done: rpb.FilesForgotten
    ) -> None:
        """Record that a shard has deleted files. Raises PoolNotFoundError, StaleEpochError."""
        pool, _ = self._shard(pool_id, shard_index, epoch)
        pool.shards.file_forgets.done(done.forget_id, shard_index)

    def take_notified(self) -> list[tuple[str, int]]:
        """Return the shards (pool, index) with messages, of pools touched since the last call."""
        notified = []
        for pool in self.touched:
            if pool not in self._announcing and pool.has_announcements:
                self._announcing.add(pool)
            if pool.watchers:
                pool.wake_watchers()
            if pool.has_work:
                self._working.add(pool)
            notified += [(pool.id, i) for i in pool.shards.take_notified()]
        self.touched.clear()
        return notified

    def has_announcements(self) -> bool:
        """Return whether ``announce`` has work. Call ``take_notified`` before."""
        return bool(self._announcing)

    def announce(self) -> None:
        """Queue publications and withdrawals for shards, for a few milliseconds at most. No step
        waits for this, and the publications of many steps are sent together.
        """
        for pool in [*self._announcing]:
            self.touched.add(pool)
            pool.announce()
            if not pool.has_announcements:
                self._announcing.remove(pool)

    def has_work(self) -> bool:
        """Return whether ``work`` has something to do. Call ``take_notified`` before."""
        return bool(self._working)

    def work(self) -> bool:
        """Continue long work for a few milliseconds: building pools, freeing forgotten prefixes,
        releasing ended sessions. Returns whether some is left.
        """
        self._working.update([pool for pool in self.touched if pool.has_work])
        for pool in [*self._working]:
            self.touched.add(pool)
            if pool.is_building:
                build_some(pool)
            else:
                if pool.is_forgetting:
                    pool.forget_some()
                self._sessions.release_some(pool)
            if not pool.has_work:
                self._working.remove(pool)
        return self.has_work()

    def take_outgoing(self, pool_id: str, shard_index: int) -> list[rpb.RegisterResponse]:
        """Return the queued messages for a shard, in order, each once; see ``take_missed``."""
        pool = self._pools.get(pool_id)
        if pool is None:
            return []
        pool.announce()
        state = pool.shards.states.get(shard_index)
        return state.take_outgoing() if state is not None else []

    def take_missed(self, pool_id: str, shard_index: int) -> list[rpb.RegisterResponse] | None:
        """Return what ``take_outgoing`` does, and then messages that a resumed shard may have
        missed, at most a megabyte. Call it again when they were sent; returns None when none are
        left.
        """
        pool = self._pools.get(pool_id)
        state = None if pool is None else pool.shards.states.get(shard_index)
        if pool is None or state is None or state.resends_from is None:
            return None
        group, first_block = state.resends_from
        outgoing = self.take_outgoing(pool_id, shard_index)
        messages, next_block = pool.missed(group, first_block)
        group += next_block == 0
        state.resends_from = (group, next_block) if group < len(pool.groups) else None
        if state.resends_from is None:
            messages += pool.shards.forgets_for(state.hello)
        return outgoing + messages

    def _shard(self, pool_id: str, shard_index: int, epoch: int) -> tuple[Pool, ShardState]:
        pool = self._pools.get(pool_id)
        if pool is None:
            raise PoolNotFoundError(f"no shard of pool {pool_id!r} has registered")
        state = pool.shards.states.get(shard_index)
        if state is None or state.hello.epoch != epoch:
            raise StaleEpochError(
                f"shard {shard_index} of pool {pool_id!r} is not registered with epoch {epoch}"
            )
        return pool, state

    def _can_resume(self, pool: Pool, hello: rpb.Hello) -> bool:
        """Return whether the same process had registered and reported, and nothing has changed."""
        state = pool.shards.states.get(hello.shard.index)
        if state is None or not state.welcomed:
            return False
        return (
            hello.incarnation == self._sessions.incarnation
            and _holds(hello, pool)
            and _is_same_run(hello, state.hello)
        )

    def _restart(self, pool: Pool, hello: rpb.Hello, layout: Layout) -> None:
        """Let a process that cannot be resumed take the shard's place.

        The other shards keep their key. When the pool's shape changes, or there is no other shard,
        only the generations are kept.
        """
        shards, index = pool.shards, hello.shard.index
        reshapes = _reshapes(pool, hello, layout)
        earlier = shards.states.get(index)
        rivals = shards.states.values() if reshapes else [earlier] if earlier is not None else []
        for state in rivals:
            _check_epoch(hello, state.hello)
        if earlier is not None or reshapes:
            pool.statistics.num_epoch_changes += 1
            self._sessions.end_all(pool)
        if reshapes or shards.num_shards == 1:
            shards.start_over(hello.shard.num_shards, layout)
        elif earlier is not None and earlier.hello.epoch != hello.epoch:
            self._sessions.fenced(pool, index, [*shards.ended])
        if pool.built or pool.is_building:
            shards.ask_again(but=index)
        pool.close()


def _holds(hello: rpb.Hello, pool: Pool) -> bool:
    """Return whether the Hello proves that its process holds the pool's key."""
    return hmac.compare_digest(hello.key_id, signing.key_id(pool.key))


def _is_same_run(hello: rpb.Hello, known: rpb.Hello) -> bool:
    """Return whether both Hellos are of one process that holds the same part of the same pool."""
    return (
        hello.epoch == known.epoch
        and hello.shard == known.shard
        and hello.layout == known.layout
        and hello.num_device_blocks == known.num_device_blocks
        and hello.num_host_blocks == known.num_host_blocks
        and [*hello.groups] == [*known.groups]
    )


def _reshapes(pool: Pool, hello: rpb.Hello, layout: Layout) -> bool:
    """Return whether the shard divides the pool into other parts, or holds other data, than the
    shards before.

    Raises InvalidRequestError or LayoutMismatchError when it does, and another shard is connected;
    then also ProtocolMismatchError, when their releases have no payload version in common.
    """
    shards = pool.shards
    others = [state for i, state in shards.states.items() if i != hello.shard.index]
    is_alone = not any(state.connected for state in others)
    if hello.shard.num_shards != shards.num_shards:
        if is_alone:
            return True
        raise InvalidRequestError(
            f"must be {shards.num_shards}, as for the pool's other shards",
            field="hello.shard.num_shards",
        )
    if layout.fingerprint != shards.layout.fingerprint:
        if is_alone:
            return True
        raise LayoutMismatchError(
            f"has {layout.differences(shards.layout)}, as the pool's other shards have",
            field="hello.layout",
        )
    try:
        payload_version([hello, *(state.hello for state in others)])
    except ProtocolMismatchError:
        if is_alone:
            return True
        raise
    overlapping = shards.overlapping(hello.shard)
    for i in overlapping:
        if not is_alone:
            raise InvalidRequestError(
                f"overlaps with shard {i}: each KV head of each layer is held by one shard, or by "
                "copies of one part",
                field="hello.shard",
            )
    return bool(overlapping)


def _check_epoch(hello: rpb.Hello, registered: rpb.Hello) -> None:
    if hello.epoch < registered.epoch:
        raise StaleEpochError(
            f"shard {registered.shard.index} of pool {hello.pool_id!r} is registered by a later "
            f"process, of epoch {registered.epoch}: if this process is the later one, its clock is "
            f"behind: start it with --epoch {registered.epoch + 1}",
            field="hello.epoch",
        )


def _validate(hello: rpb.Hello) -> Layout:
    """Check a hello; returns its layout. Raises InvalidRequestError naming the field at fault."""
    shard = hello.shard
    longest = MAX_POOL_ID_CHARACTERS
    _require(1 <= len(hello.pool_id) <= longest, "pool_id", f"1 to {longest} characters")
    longest = MAX_ADDRESS_CHARACTERS
    _require(
        1 <= len(hello.address) <= longest, "address", f"host:port of 1 to {longest} characters"
    )
    longest = MAX_VERSION_CHARACTERS
    _require(1 <= len(hello.version) <= longest, "version", f"1 to {longest} characters")
    oldest, newest = hello.oldest_payload_version, hello.newest_payload_version
    _require(oldest >= 1, "oldest_payload_version", "at least 1")
    _require(newest >= oldest, "newest_payload_version", f"at least {oldest}, the oldest")
    layout = served_layout(hello.layout, field="hello.layout")
    _require(1 <= shard.num_shards <= MAX_SHARDS, "shard.num_shards", f"from 1 to {MAX_SHARDS}")
    _require(0 <= shard.index < shard.num_shards, "shard.index", "from 0 to num_shards - 1")
    _require(hello.epoch > 0, "epoch", "above 0")
    _check_num_blocks(hello, "")
    _require(len(hello.key_id) in _KEY_ID_BYTES, "key_id", "16 bytes, or empty")
    num_groups = len(layout.groups)
    if num_groups > 1:
        _require(len(hello.groups) == num_groups, "groups", f"{num_groups}, one for each group")
    else:
        _require(not hello.groups, "groups", "empty where there is one layer group")
    for i, group in enumerate(hello.groups):
        _check_num_blocks(group, f"groups[{i}].")
    held = {
        "layer": (
            shard.first_layer,
            shard.num_layers,
            max(group.layers[-1] for group in layout.groups) + 1,
        ),
        "kv_head": (shard.first_kv_head, shard.num_kv_heads, most_kv_heads(layout)),
    }
    for name, (first, num, end) in held.items():
        _require(0 <= first < end, f"shard.first_{name}", f"from 0 to {end - 1}")
        _require(1 <= num <= end - first, f"shard.num_{name}s", f"from 1 to {end - first}")
    try:
        Shard.from_proto(shard).layers(layout)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            "must have layers of each layer group, and whole KV heads of them; copies are numbered "
            "below num_shards",
            field=f"hello.{error.field}",
        ) from error
    return layout


def _check_num_blocks(message: rpb.Hello | rpb.GroupBlocks, at: str) -> None:
    most = MAX_BLOCKS
    num_device, num_host = message.num_device_blocks, message.num_host_blocks
    _require(1 <= num_device <= most, f"{at}num_device_blocks", f"from 1 to {most}")
    _require(0 <= num_host <= most, f"{at}num_host_blocks", f"from 0 to {most}")


def _require(ok: bool, field: str, wanted: str) -> None:
    if not ok:
        raise InvalidRequestError(f"must be {wanted}", field=f"hello.{field}")


def begin_if_complete(pool: Pool) -> None:
    """Begin to build the pool once its shards hold everything, have reported, and have fenced all
    ended sessions. ``build_some`` continues until the pool is built; a small one is built now.
    """
    shards = pool.shards
    if pool.built or pool.is_building or shards.is_fencing or not shards.are_complete:
        return
    pool.begin_build()
    most = max(total_blocks(state.hello) for state in shards.states.values())
    while most <= _SMALL_BLOCKS and not build_some(pool):
        pass


def build_some(pool: Pool) -> bool:
    """Continue a build for a few milliseconds; returns whether the pool is built now."""
    if all(rebuild.step(_SLICE_BLOCKS) for rebuild in pool.shards.reports.rebuilds):
        pool.end_build()
    return pool.built
