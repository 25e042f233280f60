"""Cached prefixes of one tenant, found, retained and forgotten without a session.

``watching`` has the watchers of an index. Like every message, requests are of the wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvplane_blocks import PrefixSearch

from control_plane import checks
from control_plane.pools.pool import Pool
from control_plane.pools.publications import (
    HASH_BYTES,
    MAX_NAMESPACE_CHARACTERS,
    owner_of,
    root_of,
)
from kvplane.errors import BlockInUseError, InvalidRequestError, QuotaExceededError
from kvplane.slices import Slices
from kvplane.wire.error_messages import seconds_of
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import prefix_pb2 as pb

MAX_PRIORITY: Final = 100
_TOKEN_BYTES: Final = 4
# Entries of a prefix that are counted when it is forgotten: a fraction of a millisecond.
_MOST_COUNTED: Final = 4096
# Blocks that are looked for in one slice: a millisecond. To look into a pool takes as long as some.
_SLICE_BLOCKS: Final = 16_384
_POOL_BLOCKS: Final = 64


def check_namespace(namespace: str) -> None:
    """Check that the namespace is valid for a session. Raises InvalidRequestError."""
    checks.short(namespace, MAX_NAMESPACE_CHARACTERS, "namespace")


def find(
    pools: Iterable[Pool], request: pb.FindPrefixRequest, tenant: str
) -> Slices[pb.FindPrefixResponse]:
    """Return the longest cached prefix of a prompt in each pool, as of one moment of that pool.
    Raises InvalidRequestError.
    """
    check_namespace(request.namespace)
    token_ids, hashes = request.token_ids, request.hashes
    if hashes and token_ids:
        raise InvalidRequestError("must be empty where token_ids are given", field="hashes")
    if len(hashes) % HASH_BYTES:
        raise InvalidRequestError(f"must hold {HASH_BYTES} bytes for each block", field="hashes")
    if not hashes:
        checks.token_ids(token_ids, at_least=1, field="token_ids")
    response, num_visited = pb.FindPrefixResponse(), 0
    for pool in pools:
        if num_visited >= _SLICE_BLOCKS:
            num_visited = 0
            yield
        prompt = token_ids, hashes, request.with_blocks
        search = yield from _search(pool, tenant, request.namespace, prompt)
        # All of the answer is read in the slice in which the search has ended.
        num_device, num_host = search.counts()
        num_visited += _POOL_BLOCKS + num_device + num_host
        match = response.matches.add(
            pool_id=pool.id,
            num_device_tokens=num_device * pool.block_size,
            num_host_tokens=num_host * pool.block_size,
            revision=pool.revision(),
        )
        if request.with_blocks:
            num_visited += num_device + num_host
            _describe(match.blocks, search)
    return response


def _search(
    pool: Pool, tenant: str, namespace: str, prompt: tuple[bytes, bytes, bool]
) -> Slices[PrefixSearch]:
    """Search a pool. ``prompt``: its tokens or its hashes, and whether blocks are described."""
    while True:
        native, root = pool.native, root_of(pool.layout.fingerprint, tenant, namespace)
        search = native.search(pool.primary, root, *prompt)
        while search.search_some(_SLICE_BLOCKS):
            yield
            if pool.native is not native:  # it was rebuilt
                break
        else:
            return search


def _describe(blocks: pb.PrefixBlocks, search: PrefixSearch) -> None:
    """Describe the blocks that a search found. Fields are set one by one: a message of them all
    would be copied.
    """
    (
        blocks.hashes,
        blocks.tiers,
        blocks.indices,
        blocks.generations,
        blocks.ref_counts,
        blocks.num_hits,
        blocks.ages_ms,
        blocks.idle_ms,
        blocks.priorities,
    ) = search.blocks()


def retain(pool: Pool, request: pb.RetainPrefixRequest, tenant: str) -> pb.RetainPrefixResponse:
    """Protect a prompt's cached prefix from eviction for some time, or end that. Raises
    InvalidRequestError, PoolNotReadyError, QuotaExceededError.
    """
    check_namespace(request.namespace)
    token_ids = request.token_ids
    checks.token_ids(token_ids, at_least=1, field="token_ids")
    ends = not request.HasField("time_to_live")
    time_to_live_s = 0.0 if ends else seconds_of(request.time_to_live)
    if not ends and time_to_live_s <= 0:
        raise InvalidRequestError("must be above 0", field="time_to_live")
    if not ends and not 1 <= request.priority <= MAX_PRIORITY:
        raise InvalidRequestError(f"must be from 1 to {MAX_PRIORITY}", field="priority")
    pool.require_built()
    root, owner = root_of(pool.layout.fingerprint, tenant, request.namespace), pool.owner(tenant)
    if ends:
        return pb.RetainPrefixResponse(
            num_blocks=pool.native.release_retained(root, owner, token_ids)
        )
    done = pool.native.retain(
        root,
        owner,
        token_ids,
        request.priority,
        pool.now_s + time_to_live_s,
        pool.num_retainable_blocks(),
    )
    if len(done) == 5:
        _, _, most, num, more = done
        raise QuotaExceededError(
            f"the tenant retains {num} blocks, and may retain {most}, {more} more are asked for: "
            "end another retention first",
            field="token_ids",
        )
    return pb.RetainPrefixResponse(num_blocks=done[0])


def forget(pool: Pool, request: pb.ForgetPrefixesRequest, tenant: str) -> pb.ForgetPrefixesResponse:
    """Remove cached prefixes. Raises InvalidRequestError, PoolNotReadyError, BlockInUseError."""
    check_namespace(request.namespace)
    scope, native = request.scope, pool.native
    _check_what(request, pool.block_size)
    # Blocks that a data plane reports later would not be forgotten.
    pool.require_built()
    root = root_of(pool.layout.fingerprint, tenant, request.namespace)
    if scope == pb.FORGET_SCOPE_PREFIX:
        num_forgotten, num_in_use = native.forget(
            root, request.token_ids, request.force, _MOST_COUNTED
        )
    else:
        roots = [root]
        if scope == pb.FORGET_SCOPE_TENANT:
            roots = [each for each in pool.roots() if owner_of(each)[0] == tenant]
        num_forgotten, num_in_use = native.forget_roots(roots, request.force)
    if num_in_use and not request.force:
        raise BlockInUseError(
            f"sequences or pins refer to {num_in_use} of the blocks: end these first, or force it",
            field="token_ids" if scope == pb.FORGET_SCOPE_PREFIX else "scope",
        )
    pool.shards.forget_files(
        rpb.ForgetFiles(
            tenant=tenant,
            namespace=request.namespace,
            token_ids=request.token_ids,
            all_namespaces=scope == pb.FORGET_SCOPE_TENANT,
        )
    )
    pool.forget_some()
    return pb.ForgetPrefixesResponse(
        num_forgotten_blocks=num_forgotten, num_blocks_in_use=num_in_use
    )


def _check_what(request: pb.ForgetPrefixesRequest, block_size_tokens: int) -> None:
    if request.scope == pb.FORGET_SCOPE_PREFIX:
        checks.token_ids(request.token_ids, field="token_ids")
        num_bytes = len(request.token_ids)
        if not num_bytes or num_bytes % (_TOKEN_BYTES * block_size_tokens):
            raise InvalidRequestError(
                f"must be one or more whole blocks of {block_size_tokens} tokens", field="token_ids"
            )
    elif request.scope not in (pb.FORGET_SCOPE_NAMESPACE, pb.FORGET_SCOPE_TENANT):
        raise InvalidRequestError("must say what to forget", field="scope")
    elif request.token_ids:
        raise InvalidRequestError("must be empty for this scope", field="token_ids")
