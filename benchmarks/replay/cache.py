"""A control plane's core in this process, driven as an engine that runs one prompt at a time would.

One block of the pool stands for one block of the trace, whose tokens may be more or fewer: the
tokens are made up from the trace's id. Every plan gets its receipt, so every prompt is cached after
it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from benchmarks.control_plane import messages
from benchmarks.control_plane.messages import BLOCK_SIZE_TOKENS, EPOCH, POOL
from control_plane.config import EVICTION_POLICIES, CoreConfig
from control_plane.core import ControlPlane
from kvplane import ops
from kvplane.clients.prefix_feed import PrefixEvent, read_events
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import prefix_pb2 as ppb
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb

_TENANT = "tenant"
_REST_OF_BLOCK = bytes(4 * (BLOCK_SIZE_TOKENS - 1))
# Ends each prompt, in a block of its own, so that all blocks of the trace can be found: at least
# one token of a prompt is computed.
_LAST_TOKEN = b"\1\0\0\0"


class Prompts:
    """Makes up the tokens of a trace's ids."""

    def __init__(self) -> None:
        self._blocks: dict[int, bytes] = {}  # of each id

    def tokens(self, ids: Sequence[int]) -> bytes:
        """Return a prompt of these blocks and one token more, as int32."""
        return b"".join(map(self._block, ids)) + _LAST_TOKEN

    def _block(self, trace_id: int) -> bytes:
        tokens = self._blocks.get(trace_id)
        if tokens is None:
            tokens = len(self._blocks).to_bytes(4, "little") + _REST_OF_BLOCK
            self._blocks[trace_id] = tokens
        return tokens


class Cache:
    """A pool with room for ``capacity_blocks`` blocks of the trace.

    ``prompts``: shared with others that use the same tokens. ``num_checkpoints``: of a hybrid
    model, for how many checkpoints of its states there is room.
    """

    def __init__(
        self,
        capacity_blocks: int,
        policy: str,
        prompts: Prompts | None = None,
        num_checkpoints: int = 0,
    ) -> None:
        assert policy in EVICTION_POLICIES, policy
        self._capacity_blocks = capacity_blocks
        self._now_s = 0.0
        config = CoreConfig(lease_s=1e9, watermark=0.0, eviction_policy=policy)
        self._core = ControlPlane(incarnation=1, config=config, clock=lambda: self._now_s)
        hello = messages.hello(capacity_blocks + 1, 0, num_checkpoints)  # one for the last token
        self._key = self._core.register(hello).key
        self._core.report(POOL, 0, EPOCH, rpb.BlockReport(last=True))
        while self._core.work():  # a large pool is made some blocks at a time
            pass
        opened = self._core.open_session(messages.open_session(hello.layout), _TENANT)
        self._session = opened.session
        self._number = 0
        self._receipts: list[tpb.SignedPayload] = []
        self._prompts = prompts or Prompts()

    def run(self, time_s: float, ids: Sequence[int]) -> int:
        """Admit a prompt, compute it, free it; return how many of its leading blocks were cached.

        If the prompt is larger than the cache, only as many blocks are run as the cache holds.
        """
        self._now_s = time_s
        tokens = self._prompts.tokens(ids[: self._capacity_blocks])
        sequence_id = self._number + 1
        admitted = self._step(ops.admit(sequence_id, tokens))
        self._step(ops.free([sequence_id]))
        return admitted.results[0].admit.num_cached_tokens // BLOCK_SIZE_TOKENS

    def run_hybrid(
        self, time_s: float, ids: Sequence[int], places: Callable[[int, int], Iterable[int]]
    ) -> tuple[int, int]:
        """Do the same with a hybrid model; return how many blocks were cached, and how many
        checkpoints were kept. ``places``: tells after which blocks one is wanted, ascending, of a
        prompt with so many cached ones and so many in all.
        """
        self._now_s = time_s
        ids = ids[: self._capacity_blocks]
        sequence_id = self._number + 1
        admit = ops.admit(sequence_id, self._prompts.tokens(ids), num_compute_tokens=0)
        admitted = self._step(admit).results[0].admit
        first, num_kept = admitted.num_cached_tokens, 0
        num_cached = first // BLOCK_SIZE_TOKENS
        for place in places(num_cached, len(ids)):
            end = place * BLOCK_SIZE_TOKENS
            self._step(
                ops.append(
                    sequence_id, (), end - first, first_positions=first, checkpoint_positions=end
                )
            )
            first, num_kept = end, num_kept + 1
        rest = len(ids) * BLOCK_SIZE_TOKENS + 1 - first
        self._step(ops.append(sequence_id, (), rest, first_positions=first))
        self._step(ops.free([sequence_id]))
        return num_cached, num_kept

    def follow(self) -> None:
        """Begin to collect the index's changes for ``changes``."""
        request = ppb.WatchPrefixesRequest(pool_id=POOL)
        self._watcher = self._core.watch(request, _TENANT, lambda: None)

    def changes(self) -> list[PrefixEvent]:
        """Return the changes that followers of the pool were sent since the last call."""
        events: list[PrefixEvent] = []
        while (message := self._watcher.take()) is not None:
            events += read_events(message)
        return events

    def _step(self, operation: cpb.Operation) -> cpb.StepResponse:
        """Take a step that carries the receipt of the last one."""
        self._number += 1
        request = cpb.StepRequest(
            session=self._session,
            number=self._number,
            operations=[operation],
            receipts=self._receipts,
        )
        result = self._core.step(request, _TENANT)
        self._core.take_outgoing(POOL, 0)
        if result.results[0].failures:
            raise RuntimeError(f"the control plane refused: {result.results[0].failures}")
        plans = [result.plan] if result.HasField("plan") else []
        receipt = partial(messages.receipt, self._key, self._session, self._number)
        self._receipts = [*map(receipt, plans)]
        return result
