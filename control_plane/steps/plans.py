"""Plans as they are made: the native core encodes the body, which is signed here."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.message import Message

from control_plane.pools.pool import Pool
from control_plane.pools.publications import owner_of
from control_plane.sessions.session import PlanRecord, Session
from control_plane.steps.answers import SignedPlan
from control_plane.steps.slices import SLICE_BYTES, SLICE_ENTRIES, digest_of
from kvplane import tracing
from kvplane.slices import Slices
from kvplane.wire import signing
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as tpb


def finish_plan(session: Session, number: int, traceparent: str = "") -> Slices[SignedPlan | None]:
    """Finish the step that was begun and return its signed plan, which is in flight from now on;
    None if there is nothing to carry out. ``traceparent``: for data planes' spans; ignored if
    malformed.
    """
    while session.native.prepare(session.handle, SLICE_ENTRIES):
        yield
    prefix = session.plan_prefix
    if tracing.checked(traceparent):
        prefix += plan_pb2.Plan(traceparent=traceparent).SerializeToString()
    if session.payload_version >= 2 and session.pool.shards.file_forgets.is_due(session.tenant):
        prefix += plan_pb2.Plan(skips_files=True).SerializeToString()
    session.is_drafted = False
    payload = session.native.finish(session.handle, prefix)
    if payload is None:
        return None
    session.last_plan = number
    if len(payload) > SLICE_BYTES:
        # In flight before it is hashed: no receipt of it can come before the answer.
        session.plans[number] = PlanRecord(b"", session.pool.now_s)
        digest = yield from digest_of(payload)
    else:
        digest = signing.digest(payload)
    session.plans[number] = PlanRecord(digest, session.pool.now_s)
    return SignedPlan(payload, signing.sign_digest(session.pool.key, signing.PLAN, digest))


def sign_pin_grant(session: Session, blocks: Mapping[str, bytes]) -> tpb.SignedPayload:
    """Return a grant to read the blocks, columns of ``PinGrant``, signed with the pool's key."""
    pool = session.pool
    payload = plan_pb2.PinGrant(
        version=session.payload_version,
        session=session.ref,
        pool_id=pool.id,
        shard_epochs=session.epochs,
        **blocks,
    )
    return _signed(pool, signing.PIN_GRANT, payload)


def sign_grant(session: Session, max_plans_in_flight: int) -> tpb.SignedPayload:
    """Return the session's grant for data planes, signed with the pool's key."""
    pool = session.pool
    payload = plan_pb2.SessionGrant(
        version=session.payload_version,
        session=session.ref,
        ordinal=session.ordinal,
        pool_id=pool.id,
        shard_epochs=session.epochs,
        tenant=session.tenant,
        layout_fingerprint=pool.layout.fingerprint,
        max_plans_in_flight=max_plans_in_flight,
        namespace=owner_of(session.root)[1] if pool.shards.file_tiers else None,
    )
    return _signed(pool, signing.GRANT, payload)


def _signed(pool: Pool, kind: str, message: Message) -> tpb.SignedPayload:
    payload = message.SerializeToString(deterministic=True)
    signature = signing.sign(pool.key, kind, payload)
    return tpb.SignedPayload(type=kind, payload=payload, signature=signature)
