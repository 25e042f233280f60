"""Plans as they are made: the native core encodes the body, which is signed here."""

from __future__ import annotations

from control_plane.pools.publications import owner_of
from control_plane.sessions.session import PlanRecord, Session
from control_plane.sharing.member import Member
from control_plane.steps.slices import SLICE_ENTRIES, Slices, digest_in_slices
from kvplane import tracing
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import protocol, signing


def finish_plan(
    member: Member,
    number: int,
    answer: cpb.StepResult | cpb.ResyncResponse,
    traceparent: str = "",
) -> None:
    """End the step that was begun. Its plan, if there is anything to carry out, is in flight from
    now on and goes into ``answer``. ``traceparent``: what data planes trace it in, if it is one.
    """
    payload = _finish(member, traceparent)
    if payload is not None:
        _sign(member.session, number, payload, signing.digest(payload), answer.plan)


def finish_in_slices(
    member: Member,
    number: int,
    answer: cpb.StepResult | cpb.ResyncResponse,
    traceparent: str = "",
    *,
    most_bytes: int | None = None,
) -> Slices[bytes]:
    """``finish_plan``, with stops while whole tables are written and while the plan is hashed.
    A payload of more than ``most_bytes`` is returned, and left out of ``answer``.
    """
    session = member.session
    while session.native.prepare(session.handle, SLICE_ENTRIES):
        yield
    payload = _finish(member, traceparent)
    if payload is None:
        return b""
    begin_plan(session, number, b"")  # no receipt can come before the answer
    digest = yield from digest_in_slices(payload)
    if most_bytes is None or len(payload) <= most_bytes:
        _sign(session, number, payload, digest, answer.plan)
        return b""
    _sign(session, number, b"", digest, answer.plan)
    return payload


def begin_plan(session: Session, number: int, digest: bytes) -> bytes:
    """The plan is in flight from now on; returns its signature."""
    session.plans[number] = PlanRecord(digest, session.pool.now_s)
    session.last_plan = number
    return signing.sign_digest(session.pool.key, signing.PLAN, digest)


def _finish(member: Member, traceparent: str) -> bytes | None:
    session = member.session
    prefix = session.plan_prefix
    if tracing.checked(traceparent):
        prefix += tpb.Plan(traceparent=traceparent).SerializeToString()
    member.is_drafted = False
    return session.native.finish(session.handle, prefix)


def _sign(
    session: Session, number: int, payload: bytes, digest: bytes, plan: tpb.SignedPayload
) -> None:
    plan.type = signing.PLAN
    plan.payload = payload
    plan.signature = begin_plan(session, number, digest)


def sign_grant(session: Session, max_plans_in_flight: int) -> tpb.SignedPayload:
    """What the session may do at data planes, signed with the pool's key."""
    pool = session.pool
    payload = tpb.SessionGrant(
        version=protocol.PAYLOAD_VERSION,
        session=session.ref,
        ordinal=session.ordinal,
        pool_id=pool.id,
        shard_epochs=session.epochs,
        tenant=session.tenant,
        layout_fingerprint=pool.layout.fingerprint,
        max_plans_in_flight=max_plans_in_flight,
        namespace=owner_of(session.root)[1] if pool.shards.file_tiers else None,
    ).SerializeToString(deterministic=True)
    signature = signing.sign(pool.key, signing.GRANT, payload)
    return tpb.SignedPayload(type=signing.GRANT, payload=payload, signature=signature)
