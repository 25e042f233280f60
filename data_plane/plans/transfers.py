"""A plan's block copies and swaps: checked, then cut into batches for the kernels.

The transfers of a plan run in order, and later ones may read what earlier ones wrote. Consecutive
ones of the same direction make one call of a kernel, which keeps their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from data_plane.plans.block_tables import ResidentTables
from data_plane.plans.table_changes import HandedOut, check_generation, check_tier
from kvplane.errors import InvalidRequestError, StaleGenerationError
from kvplane.v1 import types_pb2 as pb


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive transfers of one direction."""

    source_tier: pb.Tier
    destination_tier: pb.Tier
    pairs: torch.Tensor
    """[num_blocks, 2] int64, CPU: source index, destination index."""


def check_transfers(tables: ResidentTables, plan: pb.Plan, handed_out: HandedOut) -> None:
    """Check ``plan.transfers`` against the tables after the plan's changes.

    Raises InvalidRequestError and StaleGenerationError, naming the field.
    """
    for i, transfer in enumerate(plan.transfers):
        at = f"plan.transfers[{i}]"
        if transfer.group != 0:
            raise InvalidRequestError("no such layer group", field=f"{at}.group")
        source, destination = transfer.source, transfer.destination
        for ref, where in ((source, f"{at}.source"), (destination, f"{at}.destination")):
            if not 0 <= ref.index < check_tier(tables, ref.tier, f"{where}.tier"):
                raise InvalidRequestError("no such block", field=f"{where}.index")
        if source.tier == destination.tier == pb.TIER_HOST:
            raise InvalidRequestError("host to host is no transfer", field=f"{at}.destination.tier")
        if (source.tier, source.index) == (destination.tier, destination.index):
            raise InvalidRequestError("is the source", field=f"{at}.destination.index")
        if (destination.tier, destination.index, destination.generation) not in handed_out:
            raise StaleGenerationError(
                f"block {destination.index} is not handed out by this plan",
                field=f"{at}.destination.generation",
            )
        if (source.tier, source.index, source.generation) not in handed_out:
            check_generation(
                tables, source.tier, source.index, source.generation, f"{at}.source.generation"
            )


def cut_into_batches(transfers: Iterable[pb.Transfer]) -> list[Batch]:
    """The batches, to be run one after the other."""

    def direction(transfer: pb.Transfer) -> tuple[pb.Tier, pb.Tier]:
        return transfer.source.tier, transfer.destination.tier

    batches = []
    for (source_tier, destination_tier), group in itertools.groupby(transfers, direction):
        pairs = torch.tensor([(t.source.index, t.destination.index) for t in group])
        batches.append(Batch(source_tier, destination_tier, pairs))
    return batches
