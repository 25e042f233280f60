"""The rules of the walk that retain and forget prefixes, and repeat that.

What was forgotten is found no more, whatever comes back. Every plan writes a number of its own into
its slots, so that blocks of the same tokens can be told apart by the plan that computed them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis.stateful import rule

from kvplane.errors import BlockInUseError, PoolNotReadyError, QuotaExceededError
from kvplane.ops import pack_tokens
from kvplane.wire.v1 import prefix_pb2
from tests.helpers.planes.planes_duplicates import LateDuplicates
from tests.helpers.planes.planes_values import Owner
from tests.helpers.planes.planes_world import POOL, ControlProcess, Found, wire

SCOPES = (
    prefix_pb2.FORGET_SCOPE_PREFIX,
    prefix_pb2.FORGET_SCOPE_NAMESPACE,
    prefix_pb2.FORGET_SCOPE_TENANT,
)


@dataclass
class _Call:
    """A call of PrefixService that was answered."""

    control: ControlProcess
    method: str
    request: Any
    tenant: str
    key: str
    answer: Any

    def again(self, control: ControlProcess) -> Any:
        return wire(getattr(control.core, self.method)(wire(self.request), self.tenant, self.key))


class PrefixCalls(LateDuplicates):
    """Retains and forgets prefixes of the engines' tenants."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def ask(self, method: str, request: Any, owner: Owner) -> Any:
        """Make a call of the latest control plane; return its answer, None if it was refused."""
        control, key = self.world.control, f"key-{len(self.calls)}-{self.rng.random()}"
        call = _Call(control, method, request, owner[0], key, None)
        try:
            call.answer = call.again(control)
        except (PoolNotReadyError, QuotaExceededError, BlockInUseError) as error:
            self.world.happened[f"{method}: {error.reason}"] += 1
            return None
        control.flush()
        self.calls.append(call)
        self.world.happened[method] += 1
        return call.answer

    @rule()
    def retain(self) -> None:
        cached = list(self.world.findable_contents(self.world.control))
        if not cached:
            return
        chosen = self.rng.choice(cached)
        request = prefix_pb2.RetainPrefixRequest(
            pool_id=POOL,
            namespace=chosen.owner[1],
            token_ids=pack_tokens(chosen.prefix),
            priority=self.rng.choice([1, 50, 100]),
        )
        if self.rng.random() < 0.8:
            request.time_to_live.FromSeconds(self.rng.choice([1, 20, 1000]))
        self.ask("retain_prefix", request, chosen.owner)

    @rule()
    def forget(self) -> None:
        control = self.world.control
        in_host = list(self.world.host_contents(control))
        cached = [*self.world.findable_contents(control), *in_host]
        if not cached:
            return
        owner, prefix = self.rng.choice(in_host or cached)[1:3]
        scope = self.rng.choice(SCOPES)
        request = prefix_pb2.ForgetPrefixesRequest(
            pool_id=POOL, namespace=owner[1], scope=scope, force=self.rng.random() < 0.7
        )
        if scope == prefix_pb2.FORGET_SCOPE_PREFIX:
            request.token_ids = pack_tokens(prefix)
        else:
            prefix = ()

        def is_meant(found: Found) -> bool:
            num = 1 if scope == prefix_pb2.FORGET_SCOPE_TENANT else 2
            return found.owner[:num] == owner[:num] and found.prefix[: len(prefix)] == prefix

        meant = set(filter(is_meant, cached))
        if self.ask("forget_prefixes", request, owner) is None:
            return
        control.forgotten |= meant
        left = {*self.world.findable_contents(control), *self.world.host_contents(control)} & meant
        assert not left, f"is found though it was just forgotten: {left}"
        self.world.happened["contents forgotten"] += len(meant)
        self.world.happened["host contents forgotten"] += len(meant.intersection(in_host))
        if self.rng.random() < 0.8 and self.world.all_are_connected(control):
            self.world.deliver_all()
            self.world.forgotten |= meant

    @rule()
    def prefix_calls_arrive_again(self) -> None:
        """Repeat a call, at the control plane that answered it or at another."""
        if not self.calls:
            return
        call = self.rng.choice(self.calls[-6:])
        control = call.control
        if control not in self.world.controls or not control.ready:
            return
        before = control.core.get_pool(POOL).SerializeToString(deterministic=True)
        assert call.again(control) == call.answer
        after = control.core.get_pool(POOL).SerializeToString(deterministic=True)
        assert after == before, "a call that arrived again changed something"
        self.world.happened["prefix calls repeated"] += 1
