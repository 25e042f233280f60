"""How a pool comes to life: shards register, report what they hold, and the index is rebuilt.

Metadata is soft state: whoever holds the memory holds its metadata too. A new control plane learns
from reports which block holds which prefix; a block is believed only if all shards say the same of
it, if its hash follows from its tokens, and if its parents are there. Where several blocks have the
hash that it names as its parent's, it is not known which of them is meant, and it is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

from control_plane.blocks.block_store import BlockStore
from control_plane.blocks.prefix_index import NO_BLOCK, chained_hash, root_hash
from control_plane.planning.checks import MAX_REPORTED
from control_plane.planning.model import Hello, Publication, ReportedBlock, Tier
from control_plane.planning.pool import Pool, ShardState
from control_plane.planning.publish import root_of
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
    """Start the pool over, all its sessions ended.

    Shards that go on keep their key, and must fence those sessions first. If the pool's shape has
    changed, or no other shard is there, nothing goes on but the generations.
    """
    changed = (hello.shard.num_shards, hello.layout) != (pool.num_shards, pool.layout)
    if changed or pool.num_shards == 1:
        pool.num_shards, pool.layout = hello.shard.num_shards, hello.layout
        pool.shards.clear()
        pool.fenced.clear()
        pool.key = new_key()
    for session_id in list(pool.fenced):
        pool.fence_done(session_id, hello.shard.index)
    pool.built = False
    pool.set_tiers(dict.fromkeys(Tier, 0))


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
    """Rebuild the pool once all shards have reported and fenced the sessions that ended."""
    shards = pool.shards.values()
    if pool.built or pool.fenced or len(shards) < pool.num_shards:
        return
    if not all(shard.reported for shard in shards):
        return
    sizes = {
        Tier.DEVICE: min(shard.hello.num_device_blocks for shard in shards),
        Tier.HOST: min(shard.hello.num_host_blocks for shard in shards),
    }
    for reported in chain.from_iterable(shard.report.values() for shard in shards):
        _learn_generation(pool.generations[reported.block.tier], reported)
    publications = _agreed_publications(pool, sizes[Tier.DEVICE])
    pool.set_tiers(sizes)
    _restore(pool.device, publications, pool.block_size)
    for shard in shards:
        shard.report.clear()
    pool.built = True


def _learn_generation(generations: list[int], reported: ReportedBlock) -> None:
    """Go on from the highest generation of each block that any shard knows of."""
    block = reported.block
    generations += [0] * (block.index + 1 - len(generations))
    generations[block.index] = max(generations[block.index], block.generation)


def _agreed_publications(pool: Pool, num_blocks: int) -> list[Publication]:
    """What every shard reports of the same block in the same generation."""
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


def _restore(store: BlockStore, publications: list[Publication], block_size: int) -> None:
    """Fill the index, parents before children; what has no sure way to its root is left out."""
    children: dict[tuple[str, bytes], list[Publication]] = {}
    prefixes: dict[tuple[str, bytes], set[tuple[bytes, bytes]]] = {}
    for publication in publications:
        if len(publication.token_ids) == block_size * 4:
            tenant, parent_hash = publication.tenant, publication.parent_hash
            children.setdefault((tenant, parent_hash), []).append(publication)
            prefix = (parent_hash, publication.token_ids)
            prefixes.setdefault((tenant, publication.hash), set()).add(prefix)
    restored: list[int] = []
    ready = [
        (tenant, b"", root_hash(root_of(tenant)), NO_BLOCK)
        for tenant, parent_hash in children
        if not parent_hash
    ]
    while ready:
        tenant, name, hash_, parent = ready.pop()
        if len(prefixes.get((tenant, name), ())) > 1:
            continue  # equal hashes join nothing
        for publication in children.pop((tenant, name), ()):
            if publication.hash != chained_hash(hash_, publication.token_ids):
                continue
            block = publication.block.index
            root = root_of(tenant)
            entered, _ = store.index.publish(root, parent, publication.token_ids, [block])
            if entered:
                restored.append(block)
                ready.append((tenant, publication.hash, publication.hash, block))
    # Parents come before children here; in the cache children go first.
    store.restore(restored[::-1])


def _require(ok: bool, field: str, wanted: str) -> None:
    if not ok:
        raise InvalidRequestError(f"must be {wanted}", field=f"hello.{field}")
