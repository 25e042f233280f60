"""vLLM's KV events, with the fields of ``vllm.distributed.kv_events`` in their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, Final, TypeAlias

from kvplane.prefixes import StoredBlock

Event: TypeAlias = dict[str, Any]
CLEARED: Final[Event] = {"type": "AllBlocksCleared"}


def stored(blocks: Iterable[StoredBlock], media: Mapping[int, str]) -> list[Event]:
    """Return the events of blocks that can be found from now on, in order: one for each run of
    blocks of a tier that follow each other in a prompt. ``media``: by ``types_pb2.Tier``.
    """
    events: list[Event] = []
    end = None  # of the last run: the hash and the tier of its last block
    for block in blocks:
        if end != (block.parent_hash, block.tier):
            parent = number_of(block.parent_hash) if any(block.parent_hash) else None
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": [],
                    "parent_block_hash": parent,
                    "token_ids": [],
                    "block_size": len(block.token_ids),
                    "lora_id": None,
                    "medium": media[block.tier],
                    "lora_name": None,
                }
            )
        events[-1]["block_hashes"].append(number_of(block.block_hash))
        events[-1]["token_ids"].extend(block.token_ids)
        end = block.block_hash, block.tier
    return events


def removed(blocks: Iterable[tuple[bytes, int]], media: Mapping[int, str]) -> list[Event]:
    """Return the events of blocks, given by hash and tier, that are gone from their tiers."""
    return [
        {
            "type": "BlockRemoved",
            "block_hashes": [number_of(block_hash) for block_hash, _ in run],
            "medium": media[tier],
        }
        for tier, run in groupby(blocks, key=lambda block: block[1])
    ]


def number_of(block_hash: bytes) -> int:
    """Return the unsigned 64-bit number that stands for a block's hash of 16 bytes."""
    return int.from_bytes(block_hash[:8], "big")


def parents_first(blocks: Iterable[StoredBlock]) -> list[StoredBlock]:
    """Return the blocks, each after its parent in whatever tier that is."""
    waiting: dict[bytes, list[StoredBlock]] = {}
    for block in blocks:
        waiting.setdefault(block.block_hash, []).append(block)
    ordered: list[StoredBlock] = []
    while waiting:
        block_hash = next(iter(waiting))
        chain = []
        while copies := waiting.pop(block_hash, None):
            chain.append(copies)
            block_hash = copies[0].parent_hash
        for copies in reversed(chain):
            ordered += copies
    return ordered
