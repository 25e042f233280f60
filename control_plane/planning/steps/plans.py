"""Plans as they are made: the native core encodes the body, which is signed here."""

from __future__ import annotations

from control_plane.planning.session import PlanRecord, Session
from control_plane.planning.sharing.member import Member
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
    session = member.session
    prefix = session.plan_prefix
    if tracing.checked(traceparent):
        prefix += tpb.Plan(traceparent=traceparent).SerializeToString()
    payload = session.native.finish(session.slot, prefix)
    member.is_drafted = False
    if payload is None:
        return
    digest = signing.digest(payload)
    session.plans[number] = PlanRecord(digest, session.pool.now_s)
    session.last_plan = number
    plan = answer.plan
    plan.type = signing.PLAN
    plan.payload = payload
    plan.signature = signing.sign_digest(session.pool.key, signing.PLAN, digest)


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
    ).SerializeToString(deterministic=True)
    signature = signing.sign(pool.key, signing.GRANT, payload)
    return tpb.SignedPayload(type=signing.GRANT, payload=payload, signature=signature)
