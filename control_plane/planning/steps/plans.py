"""Plans as they are made: the native core encodes the body, which is signed here."""

from __future__ import annotations

from control_plane.planning.session import PlanRecord
from control_plane.planning.sharing.member import Member
from kvplane import signing
from kvplane.v1 import control_pb2 as cpb


def finish_plan(member: Member, number: int, answer: cpb.StepResult | cpb.ResyncResponse) -> None:
    """End the step that was begun. Its plan, if there is anything to carry out, is in flight from
    now on and goes into ``answer``.
    """
    session = member.session
    payload = session.native.finish(session.slot, session.plan_prefix)
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
