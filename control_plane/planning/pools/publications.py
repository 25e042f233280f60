"""Publications as they travel: from the prefix index to data planes, and back in their reports.

Sessions of one root share prefixes, those of different roots never do. A root consists of the
layout's fingerprint, the tenant and the namespace.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from control_plane.planning.steps import checks
from kvplane import columns
from kvplane.columns import INT32, INT64
from kvplane.errors import InvalidRequestError
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

HASH_ALGORITHM: Final = "xxh3-128"
HASH_BYTES: Final = 16
MAX_NAMESPACE_CHARACTERS: Final = 128

NO_BLOCK: Final = -1  # the parent of the first block of a prompt

# Publications in one message. Each has at most 256 tokens of 4 bytes: far below the size limit.
MAX_PUBLICATIONS: Final = 1024
_FINGERPRINT_BYTES: Final = 32
_LENGTH: Final = struct.Struct("<I")


# A root, and columns of blocks that hold its prefixes: indices, generations, indices and
# generations of their parents, hashes, token ids.
Run = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]


class Published(NamedTuple):
    """What a data plane reports of a published block: its prefix, and which block holds the prefix
    before it (NO_BLOCK, 0 for the first block of a prompt).
    """

    root: bytes
    generation: int
    parent: int
    parent_generation: int
    hash: bytes
    token_ids: bytes


def root_of(fingerprint: bytes, tenant: str, namespace: str) -> bytes:
    """The root of the prefixes that a tenant's sessions of one namespace share."""
    names = [name.encode() for name in (tenant, namespace)]
    return fingerprint + b"".join(_LENGTH.pack(len(name)) + name for name in names)


def owner_of(root: bytes) -> tuple[str, str]:
    """The tenant and the namespace of a root."""
    begin = _FINGERPRINT_BYTES + _LENGTH.size
    (num_bytes,) = _LENGTH.unpack_from(root, _FINGERPRINT_BYTES)
    end = begin + num_bytes
    return root[begin:end].decode(), root[end + _LENGTH.size :].decode()


def publish_message(run: Run) -> cpb.RegisterResponse:
    """Announces published blocks of one root, parents before children."""
    root, indices, generations, parent_indices, parent_generations, hashes, token_ids = run
    tenant, namespace = owner_of(root)
    publications = tpb.Publications(
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
    return cpb.RegisterResponse(publish=cpb.PublishBlocks(publications=publications))


def read_publications(
    message: tpb.Publications,
    *,
    fingerprint: bytes,
    num_blocks: int,
    block_size_tokens: int,
    field: str,
) -> dict[int, Published]:
    """Reported publications by block index, of a device tier of ``num_blocks``.

    Their number is checked before any column is read. Raises InvalidRequestError naming a field
    under ``field``.
    """
    _require(message.group == 0, f"{field}.group", "must be 0: one layer group is served")
    algorithm = message.hash_algorithm
    _require(algorithm == HASH_ALGORITHM, f"{field}.hash_algorithm", f"must be {HASH_ALGORITHM!r}")
    longest = MAX_NAMESPACE_CHARACTERS
    _require(
        len(message.namespace) <= longest,
        f"{field}.namespace",
        f"must have at most {longest} characters",
    )
    num = columns.count(INT32, message.indices)
    _require(num <= num_blocks, f"{field}.indices", f"must be at most {num_blocks} blocks")
    indices = read_indices(message.indices, num_blocks, field=f"{field}.indices")
    generations = columns.read(INT64, message.generations, f"{field}.generations", length=num)
    parents = read_indices(
        message.parent_indices,
        num_blocks,
        lowest=NO_BLOCK,
        length=num,
        field=f"{field}.parent_indices",
    )
    parent_generations = columns.read(
        INT64, message.parent_generations, f"{field}.parent_generations", length=num
    )
    hashes, token_ids = message.hashes, message.token_ids
    block_bytes = block_size_tokens * 4
    for name, column, size in (
        ("hashes", hashes, HASH_BYTES),
        ("token_ids", token_ids, block_bytes),
    ):
        _require(
            len(column) == num * size, f"{field}.{name}", f"must hold {size} bytes for each block"
        )
    checks.token_ids(token_ids, field=f"{field}.token_ids")
    root = root_of(fingerprint, message.tenant, message.namespace)
    return {
        block: Published(root, *rest)
        for block, *rest in zip(
            indices,
            generations,
            parents,
            parent_generations,
            columns.fixed(hashes, HASH_BYTES),
            columns.fixed(token_ids, block_bytes),
            strict=True,
        )
    }


def read_indices(
    column: bytes, num_blocks: int, *, lowest: int = 0, length: int | None = None, field: str
) -> list[int]:
    """Block indices from ``lowest`` to ``num_blocks - 1``. Raises InvalidRequestError naming
    ``field``.
    """
    indices = columns.read(INT32, column, field, length=length)
    if indices and not lowest <= min(indices) <= max(indices) < num_blocks:
        at = next(i for i, index in enumerate(indices) if not lowest <= index < num_blocks)
        raise InvalidRequestError(
            f"must be from {lowest} to {num_blocks - 1}, the tier's blocks", field=f"{field}[{at}]"
        )
    return indices.tolist()


def _require(ok: bool, field: str, wanted: str) -> None:
    if not ok:
        raise InvalidRequestError(wanted, field=field)
