"""A session of the native core, driven without messages: for tests of the code around the core."""

from __future__ import annotations

from collections.abc import Iterable

from control_plane.pools.pool import Pool
from control_plane.sessions.session import Session
from kvplane import ops
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.v1 import types_pb2 as tpb


class NativeSession:
    """Writes prompts, each in a sequence of its own. Every plan runs at once."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.pool = session.pool
        self.id, self.handle, self.root = session.id, session.handle, session.root
        self.num_plans = 0
        self.num_sequences = 0

    def write(self, token_ids: Iterable[int]) -> list[int]:
        """Write a new sequence, all of it computed; nothing is looked up. Return its blocks."""
        native = self.pool.native
        self.num_sequences += 1
        self.num_plans += 1
        native.begin(self.handle, self.num_plans)
        packed = ops.pack_tokens(list(token_ids))
        done = native.admit(self.handle, self.num_sequences, packed, b"", -1, 0, True, 0)
        assert len(done) == 3, done
        assert native.finish(self.handle, b"") is not None
        native.receipted(self.handle, self.num_plans)
        _, indices, *_ = self.pool.primary.table(self.handle, self.num_sequences)
        return columns.read(INT32, indices, "indices").tolist()

    def free(self) -> None:
        """Free the last sequence that was written."""
        native = self.pool.native
        self.num_plans += 1
        native.begin(self.handle, self.num_plans)
        native.free(self.handle, columns.pack(INT64, [self.num_sequences]))
        native.finish(self.handle, b"")
        native.receipted(self.handle, self.num_plans)


def found(pool: Pool, root: bytes, token_ids: Iterable[int]) -> list[int]:
    """Return the device blocks that hold the longest cached prefix of a prompt."""
    _, _, indices, *_ = pool.primary.explain(root, ops.pack_tokens(list(token_ids)))
    return columns.read(INT32, indices, "indices").tolist()


def generations(pool: Pool, tier: tpb.Tier = tpb.TIER_DEVICE) -> list[int]:
    """Return the generations of all blocks of a tier."""
    column = pool.primary.generations(tier)
    return columns.read(INT64, column, "generations").tolist()
