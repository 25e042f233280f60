"""Messages to the core's values and back. Nothing here decides anything; whatever is no value of
the core's is refused by field.

What an operation holds is for the core to judge, since a wrong operation fails alone; here a step
fails only when it can not be read as operations at all. Plans are serialised deterministically:
their bytes are what is signed and named by digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError

from control_plane.planning import model
from kvplane import signing
from kvplane.error_codec import to_wire
from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.layout import Layout
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

FINGERPRINT_BYTES: Final = 32
HASH_BYTES: Final = 16
MAX_NAME_CHARACTERS: Final = 128

_TIER_TO_WIRE: Final = {
    model.Tier.DEVICE: tpb.TIER_DEVICE,
    model.Tier.HOST: tpb.TIER_HOST,
}
_TIER_FROM_WIRE: Final = {wire: tier for tier, wire in _TIER_TO_WIRE.items()}
_STATUS_TO_WIRE: Final = {
    model.Status.OK: cpb.OPERATION_STATUS_OK,
    model.Status.LATER: cpb.OPERATION_STATUS_LATER,
    model.Status.NEVER: cpb.OPERATION_STATUS_NEVER,
    model.Status.FAILED: cpb.OPERATION_STATUS_FAILED,
}


# Steps, inwards.


def operations_from_proto(messages: Sequence[cpb.Operation]) -> list[model.Operation]:
    """Raises InvalidRequestError naming ``operations[i]`` when one names no change that is known
    here.
    """
    return [_operation_from_proto(m, f"operations[{i}]") for i, m in enumerate(messages)]


def late_tokens_from_proto(messages: Iterable[cpb.LateTokens]) -> list[model.LateTokens]:
    return [model.LateTokens(m.sequence_id, m.first_position, m.token_ids) for m in messages]


def receipts_from_proto(key: bytes, messages: Sequence[tpb.SignedPayload]) -> list[model.Receipt]:
    """Verified receipts. Raises BadSignatureError or InvalidRequestError naming ``receipts[i]``."""
    return [_receipt_from_proto(key, m, f"receipts[{i}]") for i, m in enumerate(messages)]


def content_digest(request: cpb.StepRequest) -> bytes:
    """What makes two requests of one number the same: all but the receipts, which may differ on a
    resend.

    Takes the receipts out of ``request``.
    """
    request.ClearField("receipts")
    return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()


def resync_digest(request: cpb.ResyncRequest) -> bytes:
    """As ``content_digest``; never equal to that of a StepRequest."""
    return hashlib.sha256(b"resync" + request.SerializeToString(deterministic=True)).digest()


def of_one_operation(error: KvplaneError) -> KvplaneError:
    """An error of a step of one operation, its field named as in the unary request."""
    _, found, rest = error.field.partition(".")
    if not error.field.startswith("operations[0]"):
        return error
    inner = rest.partition(".")[2] if found else ""  # without the operation's kind
    field = f"operation.{inner}" if inner else "operation"
    return type(error)(error.message, field=field, retry_delay_s=error.retry_delay_s)


def layout_fingerprint(message: tpb.Layout) -> bytes:
    """The fingerprint of a layout that is sent whole or by its fingerprint alone."""
    if message.model_id or message.groups or message.block_size_tokens:
        return _served_layout(message, "layout").fingerprint
    if len(message.fingerprint) != FINGERPRINT_BYTES:
        raise InvalidRequestError(
            f"must be {FINGERPRINT_BYTES} bytes, or the layout must be whole",
            field="layout.fingerprint",
        )
    return message.fingerprint


def require_name(value: str, field: str, *, may_be_empty: bool = False) -> str:
    """A name of at most ``MAX_NAME_CHARACTERS``. Raises InvalidRequestError naming ``field``."""
    if len(value) > MAX_NAME_CHARACTERS or not (value or may_be_empty):
        shortest = 0 if may_be_empty else 1
        raise InvalidRequestError(
            f"must have {shortest} to {MAX_NAME_CHARACTERS} characters", field=field
        )
    return value


# Plans.


def seal(key: bytes, plan: model.Plan) -> model.SealedPlan:
    """The plan's bytes, signed with the pool's key."""
    payload = plan_to_proto(plan).SerializeToString(deterministic=True)
    signature = signing.sign(key, signing.PLAN, payload)
    return model.SealedPlan(payload, signature, signing.digest(payload))


def plan_to_proto(plan: model.Plan) -> tpb.Plan:
    message = tpb.Plan(
        pool_id=plan.pool_id,
        shard_epochs=plan.shard_epochs,
        incarnation=plan.incarnation,
        session_id=plan.session_id,
        number=plan.number,
        previous=plan.previous,
        resync=plan.resync,
    )
    for change in plan.changes:
        _add_change(message, change)
    for transfer in plan.transfers:
        message.transfers.add(
            source=block_to_proto(transfer.source), destination=block_to_proto(transfer.destination)
        )
    add_row = message.rows.add
    for sequence_id, first_position, num_tokens in plan.rows:
        row = add_row()
        row.sequence_id = sequence_id
        row.first_position = first_position
        row.num_tokens = num_tokens
    return message


def sealed_to_proto(sealed: model.SealedPlan) -> tpb.SignedPayload:
    return tpb.SignedPayload(type=signing.PLAN, payload=sealed.payload, signature=sealed.signature)


def grant_to_proto(session: model.OpenedSession) -> tpb.SignedPayload:
    """The session's grant, signed with the pool's key."""
    payload = tpb.SessionGrant(
        pool_id=session.pool_id,
        shard_epochs=session.shard_epochs,
        incarnation=session.incarnation,
        session_id=session.session_id,
        tenant=session.tenant,
        layout_fingerprint=session.layout.fingerprint,
        max_plans_in_flight=session.max_plans_in_flight,
    ).SerializeToString(deterministic=True)
    signature = signing.sign(session.key, signing.GRANT, payload)
    return tpb.SignedPayload(type=signing.GRANT, payload=payload, signature=signature)


# Answers.


def opened_to_proto(session: model.OpenedSession, protocol_version: int) -> cpb.OpenSessionResponse:
    return cpb.OpenSessionResponse(
        session_id=session.session_id,
        protocol_version=protocol_version,
        time_to_live=duration(session.time_to_live_s),
        max_plans_in_flight=session.max_plans_in_flight,
        grant=grant_to_proto(session),
        shards=[shard_info_to_proto(shard) for shard in session.shards],
        layout=session.layout.to_proto(),
        num_device_blocks=session.num_device_blocks,
        num_host_blocks=session.num_host_blocks,
        incarnation=session.incarnation,
    )


def duration(seconds: float) -> duration_pb2.Duration:
    """A span of at least 0 s, to the nanosecond."""
    whole = int(seconds)
    return duration_pb2.Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def step_result_to_proto(outcome: model.StepOutcome) -> cpb.StepResult:
    message = cpb.StepResult(usage=usage_to_proto(outcome.usage))
    if outcome.plan is not None:
        message.plan.CopyFrom(sealed_to_proto(outcome.plan))
    for result in outcome.results:
        _add_result(message, result)
    return message


def usage_to_proto(usage: Iterable[model.TierUsage]) -> cpb.PoolUsage:
    message = cpb.PoolUsage()
    for tier in usage:
        message.tiers.add(
            tier=_TIER_TO_WIRE[tier.tier],
            num_blocks=tier.num_blocks,
            num_free_blocks=tier.num_free_blocks,
            num_cached_blocks=tier.num_cached_blocks,
            num_held_blocks=tier.num_held_blocks,
            num_limbo_blocks=tier.num_limbo_blocks,
            num_reserved_blocks=tier.num_reserved_blocks,
        )
    return message


def sequence_to_proto(state: model.SequenceState) -> cpb.SequenceState:
    return cpb.SequenceState(
        sequence_id=state.sequence_id,
        num_tokens=state.num_tokens,
        num_scheduled_tokens=state.num_scheduled_tokens,
        num_written_tokens=state.num_written_tokens,
        num_cached_tokens=state.num_cached_tokens,
        num_blocks=state.num_blocks,
        tier=_TIER_TO_WIRE[state.tier],
    )


def shard_info_to_proto(info: model.ShardInfo) -> cpb.ShardInfo:
    shard = info.shard
    return cpb.ShardInfo(
        shard=tpb.Shard(
            index=shard.index,
            num_shards=shard.num_shards,
            first_layer=shard.first_layer,
            num_layers=shard.num_layers,
            first_kv_head=shard.first_kv_head,
            num_kv_heads=shard.num_kv_heads,
        ),
        epoch=info.epoch,
        address=info.address,
        connected=info.connected,
    )


def pool_to_proto(info: model.PoolInfo) -> cpb.DescribePoolResponse:
    counters = info.counters
    return cpb.DescribePoolResponse(
        layout=info.layout.to_proto(),
        shards=[shard_info_to_proto(shard) for shard in info.shards],
        ready=info.ready,
        usage=usage_to_proto(info.usage),
        num_sessions=info.num_sessions,
        num_sequences=info.num_sequences,
        counters=cpb.PoolCounters(
            num_lookup_tokens=counters.num_lookup_tokens,
            num_hit_tokens=counters.num_hit_tokens,
            num_copies_on_write=counters.num_copies_on_write,
            num_swapped_out_blocks=counters.num_swapped_out_blocks,
            num_swapped_in_blocks=counters.num_swapped_in_blocks,
            num_evictions=counters.num_evictions,
            num_publications=counters.num_publications,
            max_held_blocks=counters.max_held_blocks,
        ),
    )


def block_to_proto(block: model.BlockRef) -> tpb.BlockRef:
    return tpb.BlockRef(
        tier=_TIER_TO_WIRE[block.tier], index=block.index, generation=block.generation
    )


def blocks_to_proto(blocks: Sequence[model.BlockRef]) -> tpb.Blocks:
    """A run of blocks of one tier; an empty one is said to be on the device."""
    tier = blocks[0].tier if blocks else model.Tier.DEVICE
    return tpb.Blocks(
        tier=_TIER_TO_WIRE[tier],
        indices=[block.index for block in blocks],
        generations=[block.generation for block in blocks],
    )


# Registration.


def hello_from_proto(message: cpb.Hello) -> model.Hello:
    """Raises InvalidRequestError naming the field under ``hello``."""
    require_name(message.pool_id, "hello.pool_id")
    if not message.address:
        raise InvalidRequestError("must be host:port", field="hello.address")
    layout = _served_layout(message.layout, "hello.layout")
    shard = message.shard
    return model.Hello(
        pool_id=message.pool_id,
        shard=model.Shard(
            index=shard.index,
            num_shards=shard.num_shards,
            first_layer=shard.first_layer,
            num_layers=shard.num_layers,
            first_kv_head=shard.first_kv_head,
            num_kv_heads=shard.num_kv_heads,
        ),
        epoch=message.epoch,
        layout=layout,
        num_device_blocks=message.num_device_blocks,
        num_host_blocks=message.num_host_blocks,
        address=message.address,
        incarnation=message.incarnation,
    )


def welcome_to_proto(
    welcome: model.Welcome, protocol_version: int, heartbeat_s: float
) -> cpb.RegisterResponse:
    return cpb.RegisterResponse(
        welcome=cpb.Welcome(
            protocol_version=protocol_version,
            incarnation=welcome.incarnation,
            resumed=welcome.resumed,
            key=welcome.key,
            heartbeat_interval=duration(heartbeat_s),
        )
    )


def reported_blocks_from_proto(message: cpb.BlockReport) -> list[model.ReportedBlock]:
    """Raises InvalidRequestError naming the field under ``report``."""
    blocks = []
    for i, reported in enumerate(message.blocks):
        at = f"report.blocks[{i}]"
        block = _block_from_proto(reported.block, f"{at}.block")
        publication = None
        if reported.HasField("publication"):
            publication = _publication_from_proto(reported.publication, f"{at}.publication")
            if publication.block != block:
                raise InvalidRequestError(
                    "must be the block reported", field=f"{at}.publication.block"
                )
        blocks.append(model.ReportedBlock(block, publication))
    return blocks


def outgoing_to_proto(outgoing: model.Outgoing) -> cpb.RegisterResponse:
    if isinstance(outgoing, model.Fence):
        return cpb.RegisterResponse(fence=cpb.Fence(session_id=outgoing.session_id))
    response = cpb.RegisterResponse()
    response.publish.SetInParent()
    add = response.publish.publications.add
    told = outgoing.publications
    tier = _TIER_TO_WIRE[told.blocks.tier]
    for index, generation, parent_hash, hash_, token_ids in zip(
        told.blocks.indices,
        told.blocks.generations,
        told.parent_hashes,
        told.hashes,
        told.token_ids,
        strict=True,
    ):
        message = add()
        message.tenant = told.tenant
        message.parent_hash = parent_hash
        message.hash = hash_
        message.token_ids = token_ids
        block = message.block
        block.tier, block.index, block.generation = tier, index, generation
    return response


def _served_layout(message: tpb.Layout, at: str) -> Layout:
    try:
        layout = Layout.from_proto(message)
    except InvalidRequestError as error:
        field = error.field.replace("layout", at, 1)
        raise InvalidRequestError(error.message, field=field) from error
    if len(layout.groups) > 1:
        raise InvalidRequestError("one layer group is served here", field=f"{at}.groups")
    return layout


def _operation_from_proto(message: cpb.Operation, at: str) -> model.Operation:
    kind = message.WhichOneof("operation")
    if kind == "append":
        append = message.append
        return model.Append(append.sequence_id, append.token_ids, append.num_slots)
    if kind == "admit":
        admit = message.admit
        num_compute = admit.num_compute_tokens if admit.HasField("num_compute_tokens") else None
        return model.Admit(
            admit.sequence_id,
            admit.token_ids,
            num_compute,
            admit.max_total_tokens,
            admit.skip_prefix_lookup,
        )
    if kind == "fork":
        return model.Fork(message.fork.parent_sequence_id, message.fork.sequence_id)
    if kind == "free":
        return model.Free(message.free.sequence_id)
    if kind == "swap_out":
        return model.SwapOut(tuple(message.swap_out.sequence_ids))
    if kind == "swap_in":
        return model.SwapIn(tuple(message.swap_in.sequence_ids))
    raise InvalidRequestError("names no operation that is known here", field=at)


def _receipt_from_proto(key: bytes, message: tpb.SignedPayload, at: str) -> model.Receipt:
    payload = message.payload
    signing.verify(key, signing.RECEIPT, message.type, payload, message.signature, field=at)
    try:
        receipt = tpb.Receipt.FromString(payload)
    except DecodeError as error:
        raise InvalidRequestError("is no Receipt", field=f"{at}.payload") from error
    return model.Receipt(
        session_id=receipt.session_id,
        plan_number=receipt.plan_number,
        plan_digest=receipt.plan_digest,
        shard_index=receipt.shard_index,
        epoch=receipt.epoch,
        incarnation=receipt.incarnation,
    )


def _add_change(plan: tpb.Plan, change: model.TableChange) -> None:
    if isinstance(change, model.SetBlocks):
        # Filled in place: a message that is given to another is copied.
        message = plan.changes.add(sequence_id=change.sequence_id).set
        message.first_block = change.first_block
        message.blocks.tier = _TIER_TO_WIRE[change.blocks.tier]
        message.blocks.indices.extend(change.blocks.indices)
        message.blocks.generations.extend(change.blocks.generations)
        message.fresh.extend(change.fresh)
        message.replace = change.replace
    elif isinstance(change, model.ForkTable):
        fork = tpb.ForkTable(
            parent_sequence_id=change.parent_sequence_id, num_blocks=change.num_blocks
        )
        plan.changes.add(sequence_id=change.sequence_id, fork=fork)
    else:
        plan.changes.add(sequence_id=change.sequence_id, drop=tpb.DropTable())


def _add_result(step: cpb.StepResult, result: model.OperationResult) -> None:
    message = step.results.add(status=_STATUS_TO_WIRE[result.status])
    done = result.done
    if isinstance(done, model.AppendResult):
        message.append.first_position = done.first_position
        message.append.num_blocks = done.num_blocks
    elif isinstance(done, model.AdmitResult):
        message.admit.num_cached_tokens = done.num_cached_tokens
        message.admit.num_blocks = done.num_blocks
        message.admit.num_scheduled_tokens = done.num_scheduled_tokens
    elif isinstance(done, model.ForkResult):
        message.fork.num_blocks = done.num_blocks
    elif isinstance(done, model.FreeResult):
        message.free.num_released_blocks = done.num_released_blocks
    elif isinstance(done, model.SwapOutResult):
        message.swap_out.num_blocks = done.num_blocks
    elif isinstance(done, model.SwapInResult):
        message.swap_in.num_blocks = done.num_blocks
    if result.shortage is not None:
        message.shortage.CopyFrom(_shortage_to_proto(result.shortage))
    if result.error is not None:
        message.error.CopyFrom(to_wire(result.error))


def _shortage_to_proto(shortage: model.Shortage) -> cpb.Shortage:
    return cpb.Shortage(
        tier=_TIER_TO_WIRE[shortage.tier],
        num_blocks_needed=shortage.num_blocks_needed,
        num_blocks_available=shortage.num_blocks_available,
        num_blocks_pending=shortage.num_blocks_pending,
    )


def _block_from_proto(message: tpb.BlockRef, at: str) -> model.BlockRef:
    tier = _TIER_FROM_WIRE.get(message.tier)
    if tier is None:
        raise InvalidRequestError(f"tier {message.tier} is not known", field=f"{at}.tier")
    return model.BlockRef(tier, message.index, message.generation)


def _publication_from_proto(message: tpb.Publication, at: str) -> model.Publication:
    if message.group != 0:
        raise InvalidRequestError("one layer group is served here", field=f"{at}.group")
    if len(message.hash) != HASH_BYTES:
        raise InvalidRequestError(f"must be {HASH_BYTES} bytes", field=f"{at}.hash")
    if len(message.parent_hash) not in (0, HASH_BYTES):
        raise InvalidRequestError(f"must be {HASH_BYTES} bytes or none", field=f"{at}.parent_hash")
    block = _block_from_proto(message.block, f"{at}.block")
    return model.Publication(
        block, message.tenant, message.parent_hash, message.hash, message.token_ids
    )
