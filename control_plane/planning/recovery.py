"""How a pool comes to life: shards register, report what they hold, and the index is rebuilt.

Names are soft state: whoever holds the bytes holds their names too. A new control plane learns from
reports which block holds which prefix; a block is believed only if all shards say the same of it,
if its hash follows from its tokens, and if its parents are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

from control_plane.blocks.block_store import BlockTier
from control_plane.blocks.prefix_index import NO_BLOCK, Entry, PrefixIndex, chained_hash
from control_plane.planning.checks import MAX_REPORTED
from control_plane.planning.model import Hello, Publication, ReportedBlock, Tier
from control_plane.planning.pool import Pool, ShardState
from kvplane.errors import InvalidRequestError, LayoutMismatchError

MAX_BLOCKS: Final = 2**24
MAX_SHARDS: Final = 1024
MAX_ADDRESS_CHARACTERS: Final = 512


def validate_hello(hello: Hello) -> None:
    """Raise InvalidRequestError naming the field of ``hello`` at fault."""
    shard = hello.shard
    _require(1 <= len(hello.pool_id) <= 128, "pool_id", "1 to 128 characters")
    _require(1 <= shard.num_shards <= MAX_SHARDS, "shard.num_shards", f"1 to {MAX_SHARDS}")
    _require(0 <= shard.index < shard.num_shards, "shard.index", "below num_shards")
    _require(0 < hello.epoch < 2**64, "epoch", "above 0")
    _require(len(hello.layout.groups) == 1, "layout.groups", "one group")
    _require(1 <= hello.num_device_blocks <= MAX_BLOCKS, "num_device_blocks", f"1 to {MAX_BLOCKS}")
    _require(0 <= hello.num_host_blocks <= MAX_BLOCKS, "num_host_blocks", f"0 to {MAX_BLOCKS}")
    longest = MAX_ADDRESS_CHARACTERS
    _require(1 <= len(hello.address) <= longest, "address", f"1 to {longest} characters")
    group = hello.layout.groups[0]
    held = {
        "layer": (shard.first_layer, shard.num_layers, group.layers[-1] + 1),
        "kv_head": (shard.first_kv_head, shard.num_kv_heads, group.num_kv_heads),
    }
    for name, (first, num, most) in held.items():
        _require(0 <= first < most, f"shard.first_{name}", f"0 to {most - 1}")
        _require(1 <= num <= most - first, f"shard.num_{name}s", f"1 to {most - first}")


def can_resume(pool: Pool, hello: Hello, incarnation: int) -> bool:
    """Whether this is the process that registered and reported here before, unchanged."""
    shard = pool.shards.get(hello.shard.index)
    return (
        shard is not None
        and shard.reported
        and hello.incarnation == incarnation
        and shard.hello.epoch == hello.epoch
        and shard.hello.shard == hello.shard
        and shard.hello.layout == hello.layout
        and shard.hello.num_device_blocks == hello.num_device_blocks
        and shard.hello.num_host_blocks == hello.num_host_blocks
    )


def check_same_pool(pool: Pool, hello: Hello) -> None:
    """Raise unless the shard can join the pool's others that are connected."""
    if not _others_connected(pool, hello):
        return
    if hello.shard.num_shards != pool.num_shards:
        raise InvalidRequestError(
            f"the pool has {pool.num_shards} shards", field="hello.shard.num_shards"
        )
    if hello.layout.fingerprint != pool.layout.fingerprint:
        raise LayoutMismatchError("differs from the pool's other shards'", field="hello.layout")


def restart(pool: Pool, hello: Hello, new_key: Callable[[], bytes]) -> None:
    """Begin the pool's next life, all sessions of the last one ended.

    Shards that go on keep their key, and must quit those sessions first. If the pool's shape has
    changed, or no other shard is there, nothing of the last life goes on but the generations.
    """
    changed = (hello.shard.num_shards, hello.layout) != (pool.num_shards, pool.layout)
    if changed or pool.num_shards == 1:
        pool.num_shards, pool.layout = hello.shard.num_shards, hello.layout
        pool.shards.clear()
        pool.fenced.clear()
        pool.key = new_key()
    for session_id in list(pool.fenced):
        pool.quit(session_id, hello.shard.index)
    pool.built = False
    pool.set_tiers(PrefixIndex(pool.block_size), pool.generations)


def _others_connected(pool: Pool, hello: Hello) -> bool:
    return any(s.connected for i, s in pool.shards.items() if i != hello.shard.index)


def accept_report(
    pool: Pool, shard: ShardState, blocks: Sequence[ReportedBlock], *, last: bool
) -> None:
    """Take a part of a shard's report. Raises InvalidRequestError naming ``report.blocks[i]``."""
    sizes = {
        Tier.DEVICE: shard.hello.num_device_blocks,
        Tier.HOST: shard.hello.num_host_blocks,
    }
    for i, reported in enumerate(blocks):
        block = reported.block
        at = f"report.blocks[{i}].block"
        if not 0 <= block.index < sizes[block.tier]:
            raise InvalidRequestError("is not in the tier", field=f"{at}.index")
        if not 0 < block.generation <= MAX_REPORTED:
            raise InvalidRequestError("must be from 1 to 2^62", field=f"{at}.generation")
    for reported in blocks:
        shard.report[(reported.block.tier, reported.block.index)] = reported
    shard.reported = shard.reported or last


def build_if_complete(pool: Pool) -> None:
    """Rebuild the pool once all shards have reported and quit the sessions of its last life."""
    shards = pool.shards.values()
    if pool.built or pool.fenced or len(shards) < pool.num_shards:
        return
    if not all(shard.reported for shard in shards):
        return
    sizes = {
        Tier.DEVICE: min(shard.hello.num_device_blocks for shard in shards),
        Tier.HOST: min(shard.hello.num_host_blocks for shard in shards),
    }
    generations = {tier: _generations(pool, tier, size) for tier, size in sizes.items()}
    index = PrefixIndex(pool.block_size)
    publications = _agreed_publications(pool, sizes[Tier.DEVICE])
    pool.set_tiers(index, generations)
    _restore(pool.device, index, publications, pool.block_size)
    for shard in shards:
        shard.report.clear()
    pool.built = True


def _generations(pool: Pool, tier: Tier, size: int) -> list[int]:
    """The highest life of each block that any shard, or the pool's last life, knows of."""
    generations = pool.generations[tier][:size]
    generations += [0] * (size - len(generations))
    for reported in chain.from_iterable(s.report.values() for s in pool.shards.values()):
        block = reported.block
        if block.tier is tier and block.index < size:
            generations[block.index] = max(generations[block.index], block.generation)
    return generations


def _agreed_publications(pool: Pool, num_blocks: int) -> list[Publication]:
    """What every shard reports of the same block in the same life."""
    first, *others = (pool.shards[i].report for i in range(pool.num_shards))
    agreed: list[Publication] = []
    for name, reported in first.items():
        publication = reported.publication
        if (
            publication is not None
            and publication.block == reported.block
            and name[0] is Tier.DEVICE
            and name[1] < num_blocks
            and all(other.get(name) == reported for other in others)
        ):
            agreed.append(publication)
    return agreed


def _restore(
    tier: BlockTier, index: PrefixIndex, publications: list[Publication], block_size: int
) -> None:
    """Fill the index, parents before children; what has no way to its root is left out."""
    children: dict[tuple[str, bytes], list[Publication]] = {}
    for publication in publications:
        if len(publication.token_ids) == block_size * 4:
            key = (publication.tenant, publication.parent_hash)
            children.setdefault(key, []).append(publication)
    restored: list[tuple[int, Entry]] = []
    ready: list[tuple[str, Entry]] = []
    for tenant in {tenant for tenant, parent_hash in children if not parent_hash}:
        ready.append((tenant, index.root(tenant)))
    while ready:
        tenant, parent = ready.pop()
        is_root = parent.parent is None
        for publication in children.pop((tenant, b"" if is_root else parent.hash), ()):
            if publication.hash != chained_hash(parent.hash, publication.token_ids):
                continue
            entry = index.child(parent, publication.token_ids)
            if entry.block == NO_BLOCK:
                entry.block = publication.block.index
                restored.append((publication.block.index, entry))
                ready.append((tenant, entry))
    # Parents come before children here; in the cache children go first.
    tier.restore(reversed(restored))


def _require(ok: bool, field: str, wanted: str) -> None:
    if not ok:
        raise InvalidRequestError(f"must be {wanted}", field=f"hello.{field}")
