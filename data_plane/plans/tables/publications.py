"""The publications of the device tier's blocks, kept for the next control plane.

One row of arrays for each block of the tier. A publication belongs to its block's present
generation: it is dropped when the block is allocated again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from data_plane.plans.plan_columns import Mask, ints, refuse
from kvplane.errors import InvalidRequestError
from kvplane.v1 import control_pb2
from kvplane.v1 import types_pb2 as pb
from kvplane.wire import columns

_HASH_BYTES = 16
_MAX_SCOPE_CHARACTERS = 256

Scope = tuple[str, str, str]
"""Tenant, namespace, hash algorithm."""


class Publications:
    """The publications of one layer group. Not thread-safe: the executor's lock guards it."""

    def __init__(self, num_blocks: int, block_size_tokens: int, group: int = 0) -> None:
        self.published: Mask = np.zeros(num_blocks, np.bool_)
        """[num_blocks]: whether the block's present generation was published."""
        self.version = 0
        """Counts the messages that published a block, which make earlier checks outdated."""
        self.on_keep: Callable[[], None] = lambda: None
        """Is called when some were kept."""
        self._group = group
        self._block_size_tokens = block_size_tokens
        self._parents = np.zeros(num_blocks, np.int32)
        self._parent_generations = np.zeros(num_blocks, np.int64)
        self._hashes = np.zeros((num_blocks, _HASH_BYTES), np.uint8)
        self._token_ids = np.zeros((num_blocks, block_size_tokens), np.int32)
        # The order in which blocks were last published.
        self._order = np.zeros(num_blocks, np.int64)
        self._next_order = 0
        self._scope_of_block = np.zeros(num_blocks, np.int64)
        self._scopes: dict[Scope, int] = {}
        self._next_scope = 0
        self._prune_at = 64

    def __len__(self) -> int:
        return int(np.count_nonzero(self.published))

    def keep(self, message: pb.Publications, generations: NDArray[np.int64], field: str) -> int:
        """Keep the publications of blocks that still have their generation, and ignore the others.
        ``generations``: the present one of each block. Returns the number kept.

        Raises InvalidRequestError naming the part of ``field`` at fault, and keeps nothing then.
        """
        indices, parents, parent_generations, present = self._check(message, generations, field)
        blocks = indices[present]
        num_kept = len(blocks)
        if num_kept == 0:
            return 0
        hashes = np.frombuffer(message.hashes, np.uint8).reshape(-1, _HASH_BYTES)
        token_ids = np.frombuffer(message.token_ids, "<i4").reshape(-1, self._block_size_tokens)
        self._parents[blocks] = parents[present]
        self._parent_generations[blocks] = parent_generations[present]
        self._hashes[blocks] = hashes[present]
        self._token_ids[blocks] = token_ids[present]
        self._order[blocks] = np.arange(self._next_order, self._next_order + num_kept)
        self._next_order += num_kept
        scope = (message.tenant, message.namespace, message.hash_algorithm)
        self._scope_of_block[blocks] = self._number_of(scope)
        self.published[blocks] = True
        self.version += 1
        self.on_keep()
        return num_kept

    def withdraw(
        self, message: control_pb2.WithdrawBlocks, generations: NDArray[np.int64], field: str
    ) -> int:
        """Drop the publications of blocks that still have their generation, and ignore the others.
        ``generations``: the present one of each block. Returns the number dropped.

        Raises InvalidRequestError naming the part of ``field`` at fault, and drops nothing then.
        """
        indices, own = self._check_blocks(message.indices, message.generations, field)
        blocks = indices[(own == generations[indices]) & self.published[indices]]
        self.published[blocks] = False
        return len(blocks)

    def contents(self, blocks: NDArray[np.int32]) -> tuple[Scope, NDArray[np.int32]]:
        """The scope of published blocks, which must be of one, and their tokens [num_blocks,
        block_size_tokens].
        """
        number = self._scope_of_block[blocks[0]]
        scope = next(scope for scope, n in self._scopes.items() if n == number)
        return scope, self._token_ids[blocks]

    def report(
        self, generations: NDArray[np.int64], blocks_per_message: int
    ) -> Iterator[pb.Publications]:
        """All publications by scope, in their order of arrival. ``generations``: the present one of
        each block.
        """
        blocks = np.flatnonzero(self.published)
        blocks = blocks[np.argsort(self._order[blocks])]
        numbers = self._scope_of_block[blocks]
        of_number = {number: scope for scope, number in self._scopes.items()}
        for number in np.unique(numbers).tolist():
            tenant, namespace, hash_algorithm = of_number[number]
            of_scope = blocks[numbers == number]
            for begin in range(0, len(of_scope), blocks_per_message):
                part = of_scope[begin : begin + blocks_per_message]
                yield pb.Publications(
                    group=self._group,
                    tenant=tenant,
                    namespace=namespace,
                    hash_algorithm=hash_algorithm,
                    indices=part.astype("<i4").tobytes(),
                    generations=generations[part].astype("<i8").tobytes(),
                    parent_indices=self._parents[part].astype("<i4").tobytes(),
                    parent_generations=self._parent_generations[part].astype("<i8").tobytes(),
                    hashes=self._hashes[part].tobytes(),
                    token_ids=self._token_ids[part].astype("<i4").tobytes(),
                )

    def _check(
        self, message: pb.Publications, generations: NDArray[np.int64], field: str
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], Mask]:
        """Indices, parents' indices and generations, and which blocks still have the publication's
        generation.
        """
        for name in ("tenant", "namespace", "hash_algorithm"):
            if len(getattr(message, name)) > _MAX_SCOPE_CHARACTERS:
                raise InvalidRequestError(
                    f"must be at most {_MAX_SCOPE_CHARACTERS} characters", field=f"{field}.{name}"
                )
        num_blocks = len(self.published)
        indices, own = self._check_blocks(message.indices, message.generations, field)
        num = len(indices)
        parents = ints(columns.INT32, message.parent_indices, f"{field}.parent_indices", num)
        parent_generations = ints(
            columns.INT64, message.parent_generations, f"{field}.parent_generations", num
        )
        refuse(
            (parents < -1) | (parents >= num_blocks),
            InvalidRequestError,
            lambda i: f"{self._no_block(parents[i])}, and -1 stands for no parent",
            f"{field}.parent_indices",
        )
        refuse(
            (parents < 0) != (parent_generations == 0),
            InvalidRequestError,
            lambda i: "must be at least 1 for a parent, and 0 where there is no parent",
            f"{field}.parent_generations",
        )
        refuse(
            parent_generations < 0,
            InvalidRequestError,
            _too_low,
            f"{field}.parent_generations",
        )
        for name, size in (("hashes", _HASH_BYTES), ("token_ids", 4 * self._block_size_tokens)):
            if len(getattr(message, name)) != num * size:
                raise InvalidRequestError(
                    f"must have {size} bytes for each of {num} blocks, has "
                    f"{len(getattr(message, name))} bytes in all",
                    field=f"{field}.{name}",
                )
        return indices, parents, parent_generations, own == generations[indices]

    def _check_blocks(
        self, indices: bytes, generations: bytes, field: str
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Blocks of the tier, and a generation of each."""
        blocks = ints(columns.INT32, indices, f"{field}.indices")
        own = ints(columns.INT64, generations, f"{field}.generations", len(blocks))
        refuse(
            (blocks < 0) | (blocks >= len(self.published)),
            InvalidRequestError,
            lambda i: self._no_block(blocks[i]),
            f"{field}.indices",
        )
        refuse(own < 1, InvalidRequestError, _too_low, f"{field}.generations")
        return blocks, own

    def _no_block(self, block: int) -> str:
        last = len(self.published) - 1
        return f"there is no block {block}: the device tier has blocks 0 to {last}"

    def _number_of(self, scope: Scope) -> int:
        number = self._scopes.get(scope)
        if number is None:
            if len(self._scopes) >= self._prune_at:
                self._prune()
            number = self._scopes[scope] = self._next_scope
            self._next_scope += 1
        return number

    def _prune(self) -> None:
        """Drop the scopes in which nothing is published any more."""
        used = set(self._scope_of_block[self.published].tolist())
        self._scopes = {scope: n for scope, n in self._scopes.items() if n in used}
        self._prune_at = max(64, 2 * len(self._scopes))


def _too_low(_: int) -> str:
    return "must be at least 1: generations count from 1"
