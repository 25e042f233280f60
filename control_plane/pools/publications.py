"""Publications on the wire: from the prefix index to data planes, and back in their reports.

Sessions of one root share prefixes; those of different roots never do. A root consists of the
layout's fingerprint, the tenant and the namespace.
"""

from __future__ import annotations

import struct
from typing import Final

from kvplane.errors import InvalidRequestError
from kvplane.wire import columns
from kvplane.wire.columns import INT32
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb

HASH_ALGORITHM: Final = "xxh3-128"
HASH_BYTES: Final = 16
MAX_NAMESPACE_CHARACTERS: Final = 128

# Publications in one message. Each has at most 256 tokens of 4 bytes: far below the size limit.
MAX_PUBLICATIONS: Final = 1024
_FINGERPRINT_BYTES: Final = 32
_LENGTH: Final = struct.Struct("<I")


# A root, and columns of blocks that hold its prefixes: indices, generations, indices and
# generations of their parents, hashes, token ids.
Run = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]


def root_of(fingerprint: bytes, tenant: str, namespace: str) -> bytes:
    """Return the root of the prefixes that a tenant's sessions of one namespace share."""
    names = [name.encode() for name in (tenant, namespace)]
    return fingerprint + b"".join(_LENGTH.pack(len(name)) + name for name in names)


def owner_of(root: bytes) -> tuple[str, str]:
    """Return the tenant and the namespace of a root."""
    begin = _FINGERPRINT_BYTES + _LENGTH.size
    (num_bytes,) = _LENGTH.unpack_from(root, _FINGERPRINT_BYTES)
    end = begin + num_bytes
    return root[begin:end].decode(), root[end + _LENGTH.size :].decode()


def publish_message(run: Run, group: int = 0) -> rpb.RegisterResponse:
    """Return the message that announces published blocks of one root and layer group to shards."""
    root, indices, generations, parent_indices, parent_generations, hashes, token_ids = run
    tenant, namespace = owner_of(root)
    publications = plan_pb2.Publications(
        group=group,
        tenant=tenant,
        namespace=namespace,
        hash_algorithm=HASH_ALGORITHM,
        indices=indices,
        generations=generations,
        parent_indices=parent_indices,
        parent_generations=parent_generations,
        hashes=hashes,
        token_ids=token_ids,
    )
    return rpb.RegisterResponse(publish=rpb.PublishBlocks(publications=publications))


def withdraw_message(indices: bytes, generations: bytes, group: int = 0) -> rpb.RegisterResponse:
    """Return the message that tells data planes that these device blocks of a layer group, at these
    generations, are not published any more.
    """
    return rpb.RegisterResponse(
        withdraw=rpb.WithdrawBlocks(indices=indices, generations=generations, group=group)
    )


def reported_root(message: plan_pb2.Publications, *, fingerprint: bytes, num_blocks: int) -> bytes:
    """Return the root of publications that a shard reported from a device tier of ``num_blocks``.
    Reads none of their columns. Raises InvalidRequestError naming a field of the message.
    """
    algorithm = message.hash_algorithm
    _require(algorithm == HASH_ALGORITHM, "hash_algorithm", f"must be {HASH_ALGORITHM!r}")
    longest = MAX_NAMESPACE_CHARACTERS
    _require(
        len(message.namespace) <= longest, "namespace", f"must have at most {longest} characters"
    )
    num = columns.count(INT32, message.indices)
    _require(num <= num_blocks, "indices", f"must be at most {num_blocks} blocks")
    return root_of(fingerprint, message.tenant, message.namespace)


def _require(ok: bool, field: str, wanted: str) -> None:
    if not ok:
        raise InvalidRequestError(wanted, field=field)
