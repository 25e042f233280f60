"""Data planes as the core sees them: they register, report and sign receipts.

They keep neither tables nor contents: those of the native core's plans are checked by
``tests/helpers/native/native_plane.py``, and in real memory by ``tests/helpers/planes``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvplane.wire import columns, protocol, signing
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_messages import (
    DEVICE,
    TIERS,
    BlockId,
    publications_of,
)
from tests.helpers.native.native_plane import allocated_by
from tests.helpers.native.native_pool import decoded
from tests.helpers.planning.registration_messages import (
    Prefix,
    all_outgoing,
    blocks,
    hello,
    publications,
    receipt,
    report,
)

if TYPE_CHECKING:
    from tests.helpers.core.core_model import World


class Plane:
    """A data plane's process that keeps nothing: any plan counts as run."""

    def __init__(self, world: World, **fields: Any) -> None:
        """``fields``: of its Hello."""
        self.world = world
        self.hello = hello(**fields)
        self.welcome = rpb.Welcome()
        self.pool_key = b""

    @property
    def index(self) -> int:
        return self.hello.shard.index

    @property
    def epoch(self) -> int:
        return self.hello.epoch

    @property
    def key(self) -> tuple[str, int, int]:
        """The pool, the shard and the epoch, by which the core knows it."""
        return self.hello.pool_id, self.index, self.epoch

    # Registration

    def register(self, **changes: Any) -> rpb.Welcome:
        """Send the Hello with these changes. Then it is the shard whose receipts count."""
        said, self.hello = self.hello, rpb.Hello()  # the core keeps the one that it was sent
        self.hello.CopyFrom(said)
        self.hello.MergeFrom(rpb.Hello(**changes))
        self.welcome = self.world.core.register(self.hello)
        if not self.welcome.resumed:
            self.hello.incarnation = self.welcome.incarnation
            self.hello.key_id = signing.key_id(self.welcome.key)
            self.pool_key = self.welcome.key
        others = [shard for shard in self.world.shards if shard.index != self.index]
        self.world.shards = sorted([*others, self], key=lambda shard: shard.index)
        return self.welcome

    def report(self, part: rpb.BlockReport | None = None) -> None:
        self.world.core.report(*self.key, part or report())

    def join(self, part: rpb.BlockReport | None = None) -> rpb.Welcome:
        """Register, and report in one part."""
        self.register()
        self.report(part)
        return self.welcome

    def come(self) -> bool:
        """Register, and report unless resumed. Returns whether it was resumed."""
        if not self.register().resumed:
            self.report_all()
        return self.welcome.resumed

    def report_all(self) -> None:
        """Report what every block holds."""
        self.report()

    def leave(self) -> None:
        """Break the registration stream."""
        self.world.core.disconnect(*self.key)

    def fence_done(self, ref: tpb.SessionRef) -> None:
        self.world.core.fence_done(*self.key, rpb.FenceDone(session=ref))

    def take(self) -> list[rpb.RegisterResponse]:
        """Take all waiting messages of the registration stream."""
        return all_outgoing(self.world.core, *self.key[:2])

    def kinds(self) -> list[str | None]:
        """Take all waiting messages; return their kinds."""
        return [message.WhichOneof("message") for message in self.take()]

    def pump(self) -> None:
        """Receive all waiting messages of the registration stream."""
        while messages := self.take():
            for message in messages:
                self.obey(message)

    def obey(self, message: rpb.RegisterResponse) -> None:
        if message.HasField("fence"):
            self.fence_done(message.fence.session)

    # Plans

    def run(self, signed: tpb.SignedPayload) -> bool:
        """Run a plan; return False when it was refused."""
        return True

    def receipt(self, plan: tpb.SignedPayload) -> tpb.SignedPayload:
        """Return the signed statement that the plan ran."""
        return receipt(self.pool_key, plan, self.hello)


class DataPlane(Plane):
    """One shard's blocks and publications."""

    def __init__(self, world: World, **fields: Any) -> None:
        super().__init__(world, **fields)
        self.restart()

    def restart(self) -> None:
        """Begin another process, which holds nothing."""
        self.world.epoch += 1
        # The core keeps the one that it was sent.
        self.hello = rpb.Hello.FromString(self.hello.SerializeToString())
        self.hello.epoch = self.world.epoch
        self.hello.incarnation, self.hello.key_id, self.pool_key = 0, b"", b""
        self.generation: dict[BlockId, int] = {}
        self.published: dict[int, tuple[tuple[str, str], Prefix]] = {}
        self.fenced: set[int] = set()

    # Registration

    def report_all(self) -> None:
        """Report what every block holds, in two parts."""
        owned: dict[tuple[str, str], list[Prefix]] = {}
        for owner, prefix in self.published.values():
            owned.setdefault(owner, []).append(prefix)
        known = {
            tier: {i: g for (of, i), g in self.generation.items() if of == tier} for tier in TIERS
        }
        self.report(rpb.BlockReport(blocks=[blocks(known[tier], tier) for tier in TIERS]))
        told = [
            publications(prefixes, tenant=tenant, namespace=namespace)
            for (tenant, namespace), prefixes in owned.items()
        ]
        self.report(rpb.BlockReport(publications=told, last=True))

    def leave(self) -> None:
        """Break the registration stream; messages under way on it are lost."""
        self.world.core.take_outgoing(*self.key[:2])
        super().leave()

    def obey(self, message: rpb.RegisterResponse) -> None:
        super().obey(message)
        kind = message.WhichOneof("message")
        if kind == "fence":
            self.fenced.add(message.fence.session.session_id)
        elif kind == "publish":
            for owner, prefix in publications_of(message.publish.publications):
                index, generation = prefix.block
                known = self.generation.get((DEVICE, index), 0)
                assert known >= generation, f"{index} was published before it was allocated"
                if known == generation:
                    self.published[index] = owner, prefix
        elif kind == "withdraw":
            withdraw = message.withdraw
            indices = columns.read(INT32, withdraw.indices, "indices")
            for index, generation in zip(
                indices, columns.read(INT64, withdraw.generations, "generations"), strict=True
            ):
                if self.generation.get((DEVICE, index), 0) <= generation:
                    self.published.pop(index, None)
        else:
            assert kind == "report_request", kind
            self.report_all()

    # Plans

    def run(self, signed: tpb.SignedPayload) -> bool:
        if signed.signature != signing.sign(self.pool_key, signed.type, signed.payload):
            return False
        plan = plan_pb2.Plan.FromString(signed.payload)
        assert (signed.type, plan.version) == (signing.PLAN, protocol.NEWEST_PAYLOAD_VERSION)
        if (
            plan.shard_epochs[self.index] != self.epoch
            or plan.session.incarnation != self.hello.incarnation
            or plan.session.session_id in self.fenced
        ):
            return False
        for block in allocated_by(decoded(signed.payload)):
            known = self.generation.get(block.place, 0)
            assert block.generation > known, f"{block} is not new: its generation is {known}"
            self.generation[block.place] = block.generation
            if block.tier == DEVICE:
                self.published.pop(block.index, None)
        return True
