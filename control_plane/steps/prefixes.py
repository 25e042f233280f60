"""Operations on cached prefixes: to keep them longer than others, and to forget them."""

from __future__ import annotations

from typing import Final

from control_plane import checks
from control_plane.pools.publications import owner_of
from control_plane.sessions.session import Session
from kvplane.errors import BlockInUseError, InvalidRequestError, QuotaExceededError
from kvplane.v1 import control_pb2 as cpb
from kvplane.wire.error_messages import seconds_of

MAX_PRIORITY: Final = 100
# Entries of a prefix that are counted when it is forgotten: a fraction of a millisecond.
_MOST_COUNTED: Final = 4096


def retain(
    session: Session, message: cpb.Retain, result: cpb.OperationResult, *, only_check: bool
) -> None:
    """Keep the cached blocks of a prompt's prefix longer than others.

    Raises InvalidRequestError, QuotaExceededError.
    """
    checks.token_ids(message.token_ids, at_least=1, field="token_ids")
    time_to_live_s = seconds_of(message.time_to_live)
    if time_to_live_s <= 0:
        raise InvalidRequestError("must be above 0", field="time_to_live")
    if not 1 <= message.priority <= MAX_PRIORITY:
        raise InvalidRequestError(f"must be from 1 to {MAX_PRIORITY}", field="priority")
    if only_check:
        return
    pool = session.pool
    done = session.native.retain(
        session.handle,
        message.token_ids,
        message.priority,
        pool.now_s + time_to_live_s,
        pool.num_retainable_blocks(),
    )
    if len(done) == 5:
        _, _, most, num, more = done
        raise QuotaExceededError(
            f"the tenant retains {num} blocks, and may retain {most}, {more} more are asked for: "
            "release some first",
            field="token_ids",
        )
    num_blocks, _ = done
    result.retain.num_retained_blocks = num_blocks
    result.retain.num_retained_tokens = num_blocks * pool.block_size


def release(
    session: Session, message: cpb.Release, result: cpb.OperationResult, *, only_check: bool
) -> None:
    """End the retention of a prompt's prefix. Raises InvalidRequestError."""
    checks.token_ids(message.token_ids, at_least=1, field="token_ids")
    if not only_check:
        result.release.num_released_blocks = session.native.release_retained(
            session.handle, message.token_ids
        )


def forget(
    session: Session, message: cpb.Forget, result: cpb.OperationResult, *, only_check: bool
) -> None:
    """Take prefixes out of the index. Raises InvalidRequestError, BlockInUseError."""
    native, force = session.native, message.force
    what = message.WhichOneof("what")
    if what == "token_ids":
        checks.token_ids(message.token_ids, field="token_ids")
        block_bytes = 4 * session.pool.block_size
        if not message.token_ids or len(message.token_ids) % block_bytes:
            raise InvalidRequestError(
                f"must be one or more whole blocks of {session.pool.block_size} tokens",
                field="token_ids",
            )
    elif what is None or not getattr(message, what):
        raise InvalidRequestError("must say what to forget", field=what or "what")
    if only_check:
        return
    if what == "token_ids":
        num_forgotten, num_in_use = native.forget(
            session.handle, message.token_ids, force, _MOST_COUNTED
        )
    elif what == "namespace_contents":
        num_forgotten, num_in_use = native.forget_roots([session.root], force)
    else:
        roots = [root for root in session.pool.roots() if owner_of(root)[0] == session.tenant]
        num_forgotten, num_in_use = native.forget_roots(roots, force)
    if num_in_use and not force:
        raise BlockInUseError(
            f"sequences refer to {num_in_use} of the blocks: free them first, or force it",
            field=what,
        )
    tenant, namespace = owner_of(session.root)
    session.pool.shards.forget_files(
        cpb.ForgetFiles(
            tenant=tenant,
            namespace=namespace,
            token_ids=message.token_ids if what == "token_ids" else b"",
            all_namespaces=what == "tenant_contents",
        )
    )
    session.pool.forget_some()
    result.forget.num_forgotten_blocks = num_forgotten
    result.forget.num_blocks_in_use = num_in_use
