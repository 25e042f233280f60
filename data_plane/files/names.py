"""Names of files. A name is a hash of everything that determines its block's contents: the layout,
the tenant, the namespace, and every token up to the block's last. It is SHA-256 (FIPS 180-4),
because with two prompts of one name a tenant could read one's keys and values as the other's.

    scope ──► root = H(layout, tenant, namespace) ──► H(root, tokens) ──► H(that, tokens) ──► ...
                                                            └─► H(that): the checkpoint of states
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from kvplane.shard import Shard

NAME_BYTES = 32


class Scope(NamedTuple):
    """Identifies a tenant's namespace. ``tenant`` and ``root``: names of ``NAME_BYTES`` bytes."""

    tenant: bytes
    root: bytes


def scope_of(layout_fingerprint: bytes, tenant: str, namespace: str) -> Scope:
    """Return the scope of a tenant's namespace: names of the tenant and of its prefixes' root."""
    owner = _digest(b"tenant", layout_fingerprint, tenant.encode())
    return Scope(owner, _digest(b"root", owner, namespace.encode()))


def block_names(root: bytes, token_ids: bytes, block_size_tokens: int) -> Iterator[bytes]:
    """Yield the file name of each whole block of a prompt. ``token_ids``: int32 column."""
    name, size = root, 4 * block_size_tokens
    for begin in range(0, len(token_ids) - size + 1, size):
        name = _digest(b"block", name, token_ids[begin : begin + size])
        yield name


def checkpoint_name(block_name: bytes) -> bytes:
    """Return the file name of the checkpoint of states at a block's end."""
    return _digest(b"checkpoint", block_name)


def part_name(layout_fingerprint: bytes, shard: Shard, *, of_states: bool = False) -> bytes:
    """Return the name of the part of a block, or checkpoint, that a shard holds: its layers and
    heads.
    """
    kind = b"states" if of_states else b"part"
    return _digest(kind, layout_fingerprint, repr(shard.part).encode())


def folder_name(part: bytes, pool_id: str, shard: Shard) -> str:
    """Return the folder of one data plane's files, below the folder that several may share."""
    return _digest(b"folder", part, f"{shard.copy} {pool_id}".encode()).hex()[:32]


def _digest(kind: bytes, *parts: bytes) -> bytes:
    """Hash a kind and ``parts``, of which only the last may have a variable length."""
    return hashlib.sha256(b"kvplane " + kind + b"\0" + b"".join(parts)).digest()
