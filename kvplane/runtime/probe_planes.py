"""Data planes in this process for a model's probe: an executor for each layer group, and plans that
this file signs itself, because no control plane takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from data_plane.execution.executor import Executor
from kvplane.attention_options import AttentionOptions
from kvplane.layout import LATENT, LayerGroup, Layout
from kvplane.wire import columns, signing
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.protocol import NEWEST_PAYLOAD_VERSION
from kvplane.wire.v1 import types_pb2 as pb

BLOCK_SIZE_TOKENS: Final = 8
_POOL_ID: Final = "probe"
_SESSION: Final = pb.SessionRef(incarnation=1, session_id=1)


class ProbePlanes:
    """Runs forward passes of a model on executors, for sequences of ``lengths`` tokens."""

    def __init__(self, groups: Sequence[LayerGroup], dtype: str, lengths: Sequence[int]) -> None:
        self._planes = [_Plane(group, dtype, lengths) for group in groups]
        self._of_layer = {
            layer: plane
            for group, plane in zip(groups, self._planes, strict=True)
            for layer in group.layers
        }
        kept = (group.layers for group in groups if group.cache_kind == LATENT)
        self.latent_layers = frozenset(layer for layers in kept for layer in layers)

    def begin(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Start a forward pass. ``spans``: (sequence's index, first position, number of tokens)."""
        for plane in self._planes:
            plane.begin(spans)

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Write and attend in one layer: see ``kvplane.transformers.attention.Step``."""
        return self._of_layer[index].layer(index, query, key, value, options)


class _Plane:
    """An executor for one layer group, with its session and the number of its latest plan."""

    def __init__(self, group: LayerGroup, dtype: str, lengths: Sequence[int]) -> None:
        layout = Layout("probe", BLOCK_SIZE_TOKENS, dtype, dtype, (group,))
        counts = [-(-length // BLOCK_SIZE_TOKENS) for length in lengths]
        self._executor = Executor(
            layout, pool_id=_POOL_ID, num_device_blocks=sum(counts), num_threads=1
        )
        self._key = signing.new_key()
        self._executor.install(_SESSION.incarnation, self._key)
        grant = plan_pb2.SessionGrant(
            version=NEWEST_PAYLOAD_VERSION,
            session=_SESSION,
            ordinal=1,
            pool_id=_POOL_ID,
            shard_epochs=[self._executor.epoch],
            tenant="default",
            layout_fingerprint=layout.fingerprint,
            max_plans_in_flight=1,
        )
        self._executor.open(self._sign(signing.GRANT, grant.SerializeToString()))
        self._number = 0
        self._changes = _tables(counts)

    def begin(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Start a plan that computes these spans. The first plan makes the tables."""
        self._number += 1
        ids, first_positions, num_tokens = zip(*spans, strict=True)
        plan = plan_pb2.Plan(
            version=NEWEST_PAYLOAD_VERSION,
            session=_SESSION,
            pool_id=_POOL_ID,
            shard_epochs=[self._executor.epoch],
            number=self._number,
            previous=self._number - 1,
            changes=self._changes,
            spans=plan_pb2.Spans(
                sequence_ids=columns.pack(columns.INT64, (i + 1 for i in ids)),
                first_positions=columns.pack(columns.INT32, first_positions),
                num_tokens=columns.pack(columns.INT32, num_tokens),
            ),
        )
        self._changes = plan_pb2.TableChanges()
        self._executor.start(
            _SESSION.session_id, self._sign(signing.PLAN, plan.SerializeToString())
        )

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        options: AttentionOptions,
    ) -> torch.Tensor:
        there = (query.cpu(), key.cpu(), None if value is None else value.cpu())
        out = self._executor.layer(
            _SESSION.session_id, index, *there, options=options, plan_number=self._number
        )
        assert out is not None, "a layer with queries has an output"
        return out.to(query.device)

    def _sign(self, tag: str, payload: bytes) -> pb.SignedPayload:
        signature = signing.sign(self._key, tag, payload)
        return pb.SignedPayload(type=tag, payload=payload, signature=signature)


def _tables(counts: Sequence[int]) -> plan_pb2.TableChanges:
    """Return table changes that give sequence ``i`` ``counts[i]`` blocks, in descending order, so
    that a model that relies on ascending blocks fails.
    """
    total = sum(counts)
    return plan_pb2.TableChanges(
        kinds=columns.pack(columns.UINT8, [plan_pb2.TABLE_CHANGE_KIND_SET] * len(counts)),
        sequence_ids=columns.pack(columns.INT64, range(1, len(counts) + 1)),
        tiers=columns.pack(columns.UINT8, [pb.TIER_DEVICE] * len(counts)),
        first_blocks=columns.pack(columns.INT32, [0] * len(counts)),
        num_blocks=columns.pack(columns.INT32, counts),
        indices=columns.pack(columns.INT32, range(total - 1, -1, -1)),
        generations=columns.pack(columns.INT64, [1] * total),
        allocated=columns.pack(columns.UINT8, [1] * total),
    )
