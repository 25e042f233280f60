"""Valid requests of engines and data planes, which a fuzzer changes: each caller is one peer of a
plane, with a session that lasts for a while, and makes requests that the plane would grant.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from google.protobuf.message import Message

from data_plane.blocks_from_outside import BlockRange
from data_plane.server.tensor_codec import tensor_to_message
from kvplane import ops
from kvplane.integrations.push import chunks
from kvplane.integrations.push import push_pb2 as ppb
from kvplane.shard import Shard
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT64
from kvplane.wire.error_messages import duration_of
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import execution_pb2 as dpb
from kvplane.wire.v1 import pool_pb2, prefix_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.data.plan_author import (
    HOST,
    LAYOUT,
    PlanAuthor,
    drop,
    fork,
    int32,
    int64,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
    trim,
    truncate,
)
from tests.helpers.planning import registration_messages

Requests = list[tuple[str, list[Message]]]
"""Method of a service, and what is sent: several messages for a stream."""
# Of each session of a data plane.
NUM_BLOCKS, NUM_HOST_BLOCKS = 32, 2
PROMPT = ops.pack_tokens(range(LAYOUT.block_size_tokens))
WHOLE = Shard(0, 1, 0, 2, 0, 2)


def sent(signed: tpb.SignedPayload, key: bytes, change: Callable[[Message], bytes]) -> None:
    """Change what was signed, and sign it again."""
    of_type: dict[str, type[Message]] = {
        signing.PLAN: plan_pb2.Plan,
        signing.GRANT: plan_pb2.SessionGrant,
        signing.RECEIPT: plan_pb2.Receipt,
    }
    signed.payload = change(of_type[signed.type].FromString(signed.payload))
    signed.signature = signing.sign(key, signed.type, signed.payload)


def _search(rng: random.Random) -> prefix_pb2.FindPrefixRequest:
    return prefix_pb2.FindPrefixRequest(
        token_ids=ops.pack_tokens(range(rng.choice((1, 16, 64)))),
        pool_ids=["pool"],
        with_blocks=rng.random() < 0.5,
    )


def _retention(rng: random.Random) -> prefix_pb2.RetainPrefixRequest:
    return prefix_pb2.RetainPrefixRequest(
        pool_id="pool",
        token_ids=ops.pack_tokens(range(rng.choice((1, 16, 64)))),
        time_to_live=duration_of(3) if rng.random() < 0.7 else None,
        priority=50,
    )


def _forgetting(rng: random.Random) -> prefix_pb2.ForgetPrefixesRequest:
    scope = rng.choice(prefix_pb2.ForgetScope.values())
    is_prefix = scope == prefix_pb2.FORGET_SCOPE_PREFIX
    return prefix_pb2.ForgetPrefixesRequest(
        pool_id="pool",
        scope=scope,
        token_ids=ops.pack_tokens(range(16)) if is_prefix else b"",
        force=rng.random() < 0.7,
    )


class Engine:
    """A session at the control plane; ``key``: its pool's, so that receipts can be signed."""

    def __init__(self, opened: cpb.OpenSessionResponse, key: bytes, epoch: int) -> None:
        self.opened = opened
        self.key = key
        self.epoch = epoch
        self.number = 0
        self.plans: list[tpb.SignedPayload] = []

    def heard(self, method: str, answer: bytes) -> None:
        """What a unary call was answered."""
        if method == "Step":
            made = cpb.StepResponse.FromString(answer)
            self.plans += [made.plan] if made.HasField("plan") else []

    def requests(self, rng: random.Random) -> tuple[str, list[Message]]:
        """One call that the control plane would answer."""
        ref_ = self.opened.session
        made: dict[str, Callable[[], list[Message]]] = {
            "GetServerInfo": lambda: [pool_pb2.GetServerInfoRequest()],
            "ListPools": lambda: [pool_pb2.ListPoolsRequest()],
            "GetPool": lambda: [pool_pb2.GetPoolRequest(pool_id="pool")],
            "OpenSession": lambda: [self.opening()],
            "RenewSession": lambda: [cpb.RenewSessionRequest(session=ref_)],
            "CloseSession": lambda: [cpb.CloseSessionRequest(session=ref_)],
            "Step": lambda: [self._step(rng)],
            "StreamSteps": lambda: [self._on_a_stream(rng) for _ in range(rng.randrange(1, 5))],
            "AbortPlans": lambda: [self._abort(rng)],
            "ListSequences": lambda: [
                cpb.ListSequencesRequest(
                    session=ref_,
                    sequence_ids=columns.pack(INT64, [1]),
                    with_tables=rng.random() < 0.5,
                )
            ],
            "FindPrefix": lambda: [_search(rng)],
            "WatchPrefixes": lambda: [prefix_pb2.WatchPrefixesRequest(pool_id="pool")],
            "RetainPrefix": lambda: [_retention(rng)],
            "ForgetPrefixes": lambda: [_forgetting(rng)],
            "GetPoolCounters": lambda: [pool_pb2.GetPoolCountersRequest(pool_id="pool")],
            "ListSessions": lambda: [pool_pb2.ListSessionsRequest(pool_id="pool")],
            "Register": lambda: self._registration(rng),
        }
        weights = [8 if name in ("Step", "StreamSteps") else 1 for name in made]
        [method] = rng.choices([*made], weights)
        return method, made[method]()

    def _abort(self, rng: random.Random) -> cpb.AbortPlansRequest:
        return cpb.AbortPlansRequest(
            **self._numbered(rng),
            plan_number=rng.choice((0, self.number)),
            whole_tables=rng.random() < 0.5,
        )

    def _on_a_stream(self, rng: random.Random) -> cpb.StreamStepsRequest:
        if rng.random() < 0.2:
            return cpb.StreamStepsRequest(abort=self._abort(rng))
        return cpb.StreamStepsRequest(step=self._step(rng))

    def opening(self) -> cpb.OpenSessionRequest:
        return cpb.OpenSessionRequest(
            pool_id="pool",
            layout=tpb.Layout(fingerprint=registration_messages.LAYOUT.fingerprint),
            client_name="fuzz",
        )

    def _numbered(self, rng: random.Random) -> dict[str, Any]:
        self.number += 1
        of = rpb.Hello(epoch=self.epoch)
        receipts = [
            registration_messages.receipt(self.key, plan, of)
            for plan in self.plans
            if rng.random() < 0.8
        ]
        self.plans.clear()
        return {"session": self.opened.session, "number": self.number, "receipts": receipts}

    def _step(self, rng: random.Random) -> cpb.StepRequest:
        step = cpb.StepRequest(**self._numbered(rng), operations=self._operations(rng))
        if rng.random() < 0.2:
            step.deferred_tokens.CopyFrom(ops.deferred_tokens([1], [1], [20], [1], [5]))
        return step

    def _operations(self, rng: random.Random) -> list[cpb.Operation]:
        some, length = rng.randrange(1, 6), rng.choice((1, 7, 16, 20, 64))
        prompt = range(length)
        made: Sequence[Callable[[], cpb.Operation]] = (
            lambda: ops.admit(some, prompt, fork_sequence_ids=[some + 10], wait=True),
            lambda: ops.admit(some, prompt, num_compute_tokens=rng.randrange(length)),
            lambda: ops.append(some, [1, 2], num_slots=2, first_positions=length),
            lambda: ops.append([some, 2], [3, 4], 1, first_positions=[length, 20], num_tokens=1),
            lambda: ops.truncate(some, rng.randrange(length)),
            lambda: ops.fork(some, some + 20),
            lambda: ops.free([some]),
            lambda: ops.swap([some], "host"),
            lambda: ops.swap([some], "device"),
        )
        return [rng.choice(made)() for _ in range(rng.randrange(1, 4))]

    def _registration(self, rng: random.Random) -> list[Message]:
        """Of a data plane of another pool: Hello, a report, a word more."""
        hello = registration_messages.hello(
            pool_id=f"pool {rng.randrange(4)}",
            epoch=rng.randrange(1, 4),
            layout=LAYOUT.to_proto(),
        )
        prefix = registration_messages.Prefix(
            (0, 1), (-1, 0), bytes(16), bytes(4 * LAYOUT.block_size_tokens)
        )
        report = registration_messages.report({0: 1, 1: 3}, prefix, last=rng.random() < 0.7)
        done = rpb.FenceDone(session=self.opened.session)
        return [
            rpb.RegisterRequest(hello=hello),
            rpb.RegisterRequest(report=report),
            rpb.RegisterRequest(fence_done=done),
            rpb.RegisterRequest(heartbeat=rpb.Heartbeat()),
        ][: rng.randrange(1, 5)]


class Client:
    """A session at the data plane, whose plans it signs itself. ``lane``: of those that are open at
    one time; each has blocks of its own.
    """

    def __init__(self, author: PlanAuthor, session_id: int, lane: int = 0) -> None:
        self.author = author
        self.session_id = session_id
        self.number = 0
        self.generation = session_id * 1000
        self.blocks = range(lane * NUM_BLOCKS, (lane + 1) * NUM_BLOCKS)
        self.host_block = lane * NUM_HOST_BLOCKS + 1
        self.grant = author.grant(session_id)
        self.ticket = ppb.PushTicket(secret=bytes(32), num_blocks=1)

    def heard(self, method: str, answer: bytes) -> None:
        """What a unary call was answered."""
        if method == "ReceiveBlocks":
            self.ticket = ppb.ReceiveBlocksResponse.FromString(answer).ticket

    def requests(self, rng: random.Random) -> tuple[str, list[Message]]:
        """One call that the data plane would answer."""
        grant = self.grant
        made: dict[str, Callable[[], list[Message]]] = {
            "GetServerInfo": lambda: [pool_pb2.GetServerInfoRequest()],
            "Execute": lambda: self._execution(rng),
            "ReshapeAndCache": lambda: [self._write(rng)],
            "PagedAttention": lambda: [
                dpb.RunLayerRequest(grant=grant, plan=self._plan(rng), query=tensor(4))
            ],
            "CopyBlocks": lambda: [dpb.StartPlanRequest(grant=grant, plan=self._plan(rng))],
            "SwapBlocks": lambda: [dpb.StartPlanRequest(grant=grant, plan=self._plan(rng))],
            "ReadBlocks": lambda: [
                dpb.ReadBlocksRequest(grant=grant, sequence_id=1, entries=int32(0))
            ],
            "WriteBlocks": lambda: [
                dpb.WriteBlocksRequest(
                    grant=grant,
                    plan=self._plan(rng),
                    sequence_ids=int64(1),
                    entries=int32(0),
                    blocks=block(),
                )
            ],
            "ReceiveBlocks": lambda: [
                ppb.ReceiveBlocksRequest(grant=grant, plan=self._computing(1), sequence_id=1)
            ],
            "SendBlocks": lambda: [
                ppb.SendBlocksRequest(grant=grant, sequence_id=1, ticket=self.ticket)
            ],
            "PushBlocks": self._push,
            "LoadFileBlocks": lambda: [self._load(rng)],
        }
        weights = [6 if name in ("CopyBlocks", "Execute") else 1 for name in made]
        [method] = rng.choices([*made], weights)
        return method, made[method]()

    def _write(self, rng: random.Random) -> dpb.RunLayerRequest:
        request = dpb.RunLayerRequest(grant=self.grant, plan=self._plan(rng))
        request.key.CopyFrom(tensor(2))
        request.value.CopyFrom(tensor(2))
        return request

    def _load(self, rng: random.Random) -> dpb.LoadFileBlocksRequest:
        request = dpb.LoadFileBlocksRequest(grant=self.grant, token_ids=PROMPT)
        if rng.random() < 0.5:
            request.sequence_id = 1
            request.plan.CopyFrom(self._computing(LAYOUT.block_size_tokens))
        return request

    def _execution(self, rng: random.Random) -> list[Message]:
        opening = dpb.OpenExecution(grant=self.grant)
        plan = self._plan(rng)
        layers = [
            dpb.RunLayerRequest(
                layer=layer,
                query=tensor(4),
                key=tensor(2),
                value=tensor(2),
                plan_number=self.number,
            )
            for layer in (0, 1)
        ]
        return [
            dpb.ExecuteRequest(open=opening),
            dpb.ExecuteRequest(plan=dpb.StartPlanRequest(plan=plan)),
            *(dpb.ExecuteRequest(layer=layer) for layer in layers),
        ][: rng.randrange(1, 5)]

    def _push(self) -> list[Message]:
        """By the latest ticket: all that it permits."""
        ticket = self.ticket
        shard = tpb.Shard(num_shards=1, num_layers=2, num_kv_heads=2)
        opening = ppb.OpenPush(
            secret=ticket.secret,
            layout_fingerprint=self.author.layout.fingerprint,
            shard=shard,
        )
        place = BlockRange(1, ticket.first_block, ticket.num_blocks, 0, 0, 2)
        data = bytes(ticket.num_blocks * WHOLE.block_bytes(self.author.layout, 0))
        return [
            ppb.PushBlocksRequest(open=opening),
            ppb.PushBlocksRequest(chunk=chunks.chunk_of(place, data)),
        ]

    def _computing(self, num_tokens: int) -> tpb.SignedPayload:
        """A plan that computes the first tokens of sequence 1."""
        self.number += 1
        self.generation += 1
        return self.author.plan(
            self.number,
            self.session_id,
            changes=[set_blocks(1, [(self.blocks[0], self.generation)], replace=True)],
            spans=[span(1, 0, num_tokens)],
            resync=True,
        )

    def _plan(self, rng: random.Random) -> tpb.SignedPayload:
        self.number += 1
        self.generation += 1
        own = [(rng.choice(self.blocks), self.generation) for _ in range(2)]
        own = own[:1] if own[0][0] == own[1][0] else own
        free = next(i for i in self.blocks if i not in dict(own))
        host = ref(self.host_block, self.generation, HOST)
        copy = transfer(ref(own[0][0], self.generation), ref(free, self.generation))
        swap = transfer(ref(own[0][0], self.generation), host)
        changes = rng.choice(
            (
                [set_blocks(1, own, replace=True)],
                [set_blocks(1, own, replace=True), fork(2, 1, 1), truncate(2, 0)],
                [set_blocks(1, own, replace=True), trim(1, 1), drop(1)],
                [],
            )
        )
        more: dict[str, Any] = rng.choice(
            (
                {"spans": [span(1, 0, 1)]},
                {"allocations": [ref(free, self.generation)], "transfers": [copy]},
                {"allocations": [host], "transfers": [swap]},
                {},
            )
        )
        return self.author.plan(
            self.number, self.session_id, changes=changes, resync=rng.random() < 0.7, **more
        )


@cache
def tensor(num_heads: int) -> tpb.Tensor:
    """Of one token."""
    return tensor_to_message(tokens(1, num_heads))


@cache
def block() -> tpb.Tensor:
    """Of all layers."""
    return tensor_to_message(torch.zeros(2, 1, 2, 2, LAYOUT.block_size_tokens, 16))
