"""Layers that come late, early, twice or in halves, in each way in which layers come to a data
plane: none is taken for one of another plan or pass, or writes what others have by then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from data_plane import Executor, limits
from data_plane.server.embedded_execution import EmbeddedExecution
from data_plane.server.tensor_codec import tensor_to_message
from kvplane.errors import (
    BlockNotWritableError,
    InvalidRequestError,
    KvplaneError,
    PlanOutOfOrderError,
    SessionExpiredError,
    StaleGenerationError,
)
from kvplane.wire.error_messages import from_wire
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.data.plan_author import publications, set_blocks, span, tokens
from tests.helpers.local_peer import LocalPeer
from tests.helpers.served import Served, Stream, served

LAYERS = (0, 1)
NUM_PLANS = 4  # of two tokens each, in one block
NUM_PASSES = 5
OTHER_SEED = 900
"""Of tensors that are not those of the layer that is named."""


@pytest.fixture(autouse=True)
def long_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the data plane answer known packets natively, however late they are."""
    monkeypatch.setattr(limits, "LOCAL_SPIN_S", 1.0)


class Named(NamedTuple):
    """The plan and the pass that a layer names."""

    plan_number: int
    pass_index: int | None = None

    @property
    def fields(self) -> dict[str, Any]:
        return self._asdict()


PARTS = {"whole": ("query", "key", "value"), "written": ("key", "value"), "attended": ("query",)}
"""Tensors that a layer may have, and what it is called then."""


def tensors(num_tokens: int, seed: int, part: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a part of a layer, by name."""
    query = tokens(num_tokens, 4, seed=seed)
    key, value = (tokens(num_tokens, seed=seed + i) for i in (1, 2))
    return {
        n: t for n, t in zip(PARTS["whole"], (query, key, value), strict=True) if n in PARTS[part]
    }


class Caller(ABC):
    """One way to a data plane. ``parts``: the parts of a layer that can come alone."""

    parts: tuple[str, ...] = (*PARTS,)

    def can_name(self, named: Named) -> bool:
        """Return whether a layer can name this plan and pass."""
        return True

    @abstractmethod
    async def start(self, plan: tpb.SignedPayload, named: Named) -> None: ...

    @abstractmethod
    async def layer(
        self, layer: int, named: Named, num_tokens: int, seed: int, part: str
    ) -> torch.Tensor:
        """Return the output, which is empty where nothing was attended; raise what is answered."""


class ByGrpc(Caller):
    """A stream, on which a layer is one message."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def start(self, plan: tpb.SignedPayload, named: Named) -> None:
        await self._ask(plan=pb.StartPlanRequest(plan=plan, pass_index=named.pass_index))

    async def layer(
        self, layer: int, named: Named, num_tokens: int, seed: int, part: str
    ) -> torch.Tensor:
        sent = tensors(num_tokens, seed, part).items()
        messages = {name: tensor_to_message(tensor) for name, tensor in sent}
        request = pb.RunLayerRequest(layer=layer, **messages, **named.fields)
        data = bytearray((await self._ask(layer=request)).output.output.data)
        return torch.frombuffer(data, dtype=torch.float32) if data else torch.empty(0)

    async def _ask(self, **message: Any) -> pb.ExecuteResponse:
        answer = await self._stream.ask(**message)
        if answer.HasField("error"):
            raise from_wire(answer.error)
        return answer


class InProcess(Caller):
    """The executor's own calls."""

    def __init__(self, executor: Executor, grant: tpb.SignedPayload) -> None:
        self._executor = executor
        self._session_id = executor.open(grant)

    async def start(self, plan: tpb.SignedPayload, named: Named) -> None:
        self._executor.start(self._session_id, plan)
        if named.pass_index is not None:
            self._executor.begin_pass(
                self._session_id, named.pass_index, plan_number=named.plan_number
            )

    async def layer(
        self, layer: int, named: Named, num_tokens: int, seed: int, part: str
    ) -> torch.Tensor:
        given = dict.fromkeys(PARTS["whole"]) | tensors(num_tokens, seed, part)
        output = self._executor.layer(self._session_id, layer, **given, **named.fields)
        self._executor.receipt(self._session_id)  # which others ask for after the last layer
        return torch.empty(0) if output is None else output


class Embedded(Caller):
    """Executions as engines in the process have them: a layer is of the plan and pass that its
    execution started.
    """

    parts = ("whole",)

    def __init__(self, executor: Executor, grant: tpb.SignedPayload) -> None:
        self._executor = executor
        self._grant = grant
        self._started: dict[Named, EmbeddedExecution] = {}

    def can_name(self, named: Named) -> bool:
        return named in self._started

    async def start(self, plan: tpb.SignedPayload, named: Named) -> None:
        execution = EmbeddedExecution(self._executor, self._grant, take_receipt=lambda _: None)
        execution.start(plan, pass_index=named.pass_index)
        self._started[named] = execution

    async def layer(
        self, layer: int, named: Named, num_tokens: int, seed: int, part: str
    ) -> torch.Tensor:
        return self._started[named].layer(layer, **tensors(num_tokens, seed, part))


class ByMemory(Caller):
    """Shared memory. ``binds``: a layer is bound first, and asked for by a few bytes, which native
    code reads; otherwise it is one message, which Python reads.
    """

    def __init__(self, peer: LocalPeer, *, binds: bool) -> None:
        self.parts = ("whole",) if binds else self.parts
        self._peer = peer
        self._binds = binds
        self._bound: set[tuple[int, int]] = set()
        """Layers that are bound, and their numbers of tokens."""
        self._num_tokens = 0
        """Of the plan or pass that was begun last, which any layer that is late or early fits."""

    async def start(self, plan: tpb.SignedPayload, named: Named) -> None:
        fields = {} if named.pass_index is None else {"pass_index": named.pass_index}
        answer = await self._peer.ask(plan=plan, **fields)
        self._num_tokens = answer.started.num_tokens

    async def layer(
        self, layer: int, named: Named, num_tokens: int, seed: int, part: str
    ) -> torch.Tensor:
        num_tokens = self._num_tokens
        request = self._peer.layer(layer, num_tokens, seed)
        for name in {*PARTS["whole"]}.difference(PARTS[part]):
            request.ClearField(name)
        if self._binds:
            if (layer, num_tokens) not in self._bound:
                assert not (await self._peer.bind(request)).HasField("error")
                self._bound = {(i, num) for i, num in self._bound if i != layer}
                self._bound.add((layer, num_tokens))
            answer = await self._peer.ask_bound(layer, **named.fields)
        else:
            answer = await self._peer.ask(self._peer.packet(request, **named.fields))
        if answer.HasField("error"):
            raise from_wire(answer.error)
        return self._peer.output(num_tokens) if part != "written" else torch.empty(0)


WAYS = ("gRPC", "shared memory", "bound", "executor", "embedded")


class Rig:
    """A data plane with an open session, and a caller."""

    def __init__(self, peer: Served, caller: Caller) -> None:
        self.peer = peer
        self.author = peer.author
        self.caller = caller

    @property
    def memory(self) -> bytes:
        return self.peer.memory

    async def start(self, number: int) -> None:
        changes = [set_blocks(1, [(0, 1)])] if number == 1 else []
        plan = self.author.plan(number, changes=changes, spans=[span(1, 2 * (number - 1), 2)])
        await self.caller.start(plan, Named(number))

    async def begin_pass(self, index: int) -> None:
        spans = [span(1, 0, NUM_PASSES)]
        plan = self.author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=spans)
        await self.caller.start(plan, Named(1, index))

    async def layer(
        self, layer: int, named: Named, seed: int | None = None, part: str = "whole"
    ) -> torch.Tensor:
        """A layer with as many tokens as the plan or the pass that it names."""
        num_tokens = 2 if named.pass_index is None else 1
        own = 10 * named.plan_number + 100 * (named.pass_index or 0) + layer
        chosen = own if seed is None else seed
        return await self.caller.layer(layer, named, num_tokens, chosen, part)

    async def run(self, named: Named) -> None:
        for layer in LAYERS:
            await self.layer(layer, named)

    async def refuses(self, layer: int, named: Named, field: str, *numbers: int) -> None:
        """A layer is refused for what it names, if it can name that, and writes nothing."""
        before = self.memory
        parts = self.caller.parts if self.caller.can_name(named) else ()
        for seed, part in product((None, OTHER_SEED), parts):
            with pytest.raises(PlanOutOfOrderError) as caught:
                await self.layer(layer, named, seed, part)
            assert caught.value.field.removeprefix("layer.") == field
            assert all(str(number) in str(caught.value) for number in numbers)
        assert self.memory == before

    async def repeats(self, layer: int, named: Named) -> None:
        """A layer that is written is answered again, and changes nothing."""
        before = self.memory
        first, second = [await self.layer(layer, named) for _ in range(2)]
        assert torch.equal(first, second)
        assert self.memory == before


@pytest.fixture(params=WAYS)
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    way = request.param
    async with served(tmp_path, local_region_bytes=1 << 20) as peer:
        if way in ("executor", "embedded"):
            there = InProcess if way == "executor" else Embedded
            yield Rig(peer, there(peer.executor, peer.author.grant()))
            return
        if way == "gRPC":
            yield Rig(peer, ByGrpc(await peer.opened()))
            return
        local = await peer.joined()
        yield Rig(peer, ByMemory(local, binds=way == "bound"))
        assert (await peer.num_native() > 0) is (way == "bound"), "what native code answered"
        local.close()


async def test_a_layer_of_another_plan_is_refused(rig: Rig) -> None:
    """The shapes of all plans are the same: only what a layer names tells them apart."""
    for number in range(1, NUM_PLANS):
        await rig.start(number)
        await rig.run(Named(number))
    await rig.start(NUM_PLANS)
    for layer in LAYERS:
        for other in (0, 1, NUM_PLANS - 1, NUM_PLANS + 1):
            await rig.refuses(layer, Named(other), "plan_number", other, NUM_PLANS)
        await rig.layer(layer, Named(NUM_PLANS))
        await rig.repeats(layer, Named(NUM_PLANS))
    for layer in LAYERS:
        await rig.refuses(layer, Named(NUM_PLANS - 1), "plan_number", NUM_PLANS)
        before = rig.memory
        await rig.layer(layer, Named(NUM_PLANS), OTHER_SEED)
        assert rig.memory == before, "the plan has run"


async def test_a_layer_of_a_plan_that_was_voided_is_refused(rig: Rig) -> None:
    """It came to its layer 1, which comes next under the plan that voids it too."""
    for number in (1, 2, 3):
        await rig.start(number)
        await rig.run(Named(number)) if number < 3 else await rig.layer(0, Named(number))
    voids = rig.author.plan(
        4, resync=True, changes=[set_blocks(1, [(1, 1)])], spans=[span(1, 0, 2)]
    )
    await rig.caller.start(voids, Named(4))
    for layer in LAYERS:
        await rig.refuses(layer, Named(3), "plan_number", 3, 4)
        await rig.layer(layer, Named(4))
        await rig.refuses(layer, Named(3), "plan_number", 3, 4)


async def test_a_layer_of_another_pass_is_refused(rig: Rig) -> None:
    for index in (0, 1):
        await rig.begin_pass(index)
        await rig.run(Named(1, index))
    for index in range(2, NUM_PASSES):
        await rig.begin_pass(index)
        for layer in LAYERS:
            for other in {*range(NUM_PASSES), -1} - {index}:
                await rig.refuses(layer, Named(1, other), "pass_index", 1, index, other)
            await rig.refuses(layer, Named(1), "pass_index", index)
            await rig.layer(layer, Named(1, index))
            await rig.repeats(layer, Named(1, index))


async def test_a_plan_that_computes_all_at_once_is_in_no_pass(rig: Rig) -> None:
    for number in (1, 2, 3):
        await rig.start(number)
        for layer in LAYERS:
            for index in (-1, 0, 1):
                await rig.refuses(layer, Named(number, index), "pass_index", index)
            await rig.layer(layer, Named(number))


async def rejected(
    rig: Rig,
    layer: int,
    named: Named,
    error: type[KvplaneError],
    parts: Sequence[str] = ("whole", "written"),
) -> None:
    """A layer is refused, and writes nothing."""
    before = rig.memory
    for part in parts:
        if part in rig.caller.parts:
            with pytest.raises(error):
                await rig.layer(layer, named, part=part)
    assert rig.memory == before


async def two_plans(rig: Rig) -> Named:
    """Two plans have run, in which all layers were bound, and the next one has begun."""
    for number in (1, 2):
        await rig.start(number)
        await rig.run(Named(number))
    await rig.start(3)
    return Named(3)


async def test_a_block_that_was_published_since_is_not_written(rig: Rig) -> None:
    named = await two_plans(rig)
    rig.peer.executor.publish(publications((0, 1)))
    await rejected(rig, 0, named, BlockNotWritableError)


async def test_a_block_that_another_session_was_given_is_not_written(rig: Rig) -> None:
    named, author, executor = await two_plans(rig), rig.author, rig.peer.executor
    executor.open(author.grant(2))
    other = author.plan(1, 2, changes=[set_blocks(1, [(0, 2)])], spans=[span(1, 0, 1)])
    executor.start(2, other)
    await rejected(rig, 0, named, StaleGenerationError)


async def test_a_layer_out_of_order_is_refused(rig: Rig) -> None:
    named = await two_plans(rig)
    await rejected(rig, 1, named, InvalidRequestError, [*PARTS])
    await rig.run(named)


async def test_a_session_that_has_ended_writes_nothing(rig: Rig) -> None:
    named = await two_plans(rig)
    rig.peer.executor.fence(rig.author.session(1), 1)
    await rejected(rig, 0, named, SessionExpiredError, [*PARTS])


@pytest.mark.parametrize("rig", ["gRPC", "shared memory", "executor"], indirect=True)
async def test_the_halves_of_a_layer_are_the_layer(rig: Rig) -> None:
    """What was not written is not attended to; afterwards it is attended to as often as asked."""
    named = await two_plans(rig)
    for layer in LAYERS:
        await rejected(rig, layer, named, InvalidRequestError, ["attended"])
        assert not len(await rig.layer(layer, named, part="written"))
        before = rig.memory
        whole = await rig.layer(layer, named)
        assert torch.equal(await rig.layer(layer, named, part="attended"), whole)
        assert whole.abs().sum() > 0 and rig.memory == before
