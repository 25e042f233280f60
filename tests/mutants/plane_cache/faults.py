"""Planted faults of the cache for generate, with the checks that catch each.

Each takes pytest's monkeypatch and plants itself for one test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvplane import ops
from kvplane.transformers import attention, cache
from kvplane.transformers.cache import PlaneCache
from tests.helpers import plane_cache_checks as checks

Fault = Callable[[pytest.MonkeyPatch], None]


def attention_is_nothing(patch: pytest.MonkeyPatch) -> None:
    """The output of attention is lost."""
    original = attention._packed
    patch.setattr(attention, "_packed", lambda tensor, tokens: 0 * original(tensor, tokens))


def padding_is_computed(patch: pytest.MonkeyPatch) -> None:
    """Padding counts as tokens of the prompt."""
    patch.setattr(cache, "_padding_of", lambda mask, num_rows, num_columns: [0] * num_rows)


def positions_count_padding(patch: pytest.MonkeyPatch) -> None:
    """Positions are columns, as without padding."""

    def positions_of(
        given: Any, padding: Sequence[int], first: int, stop: int, device: torch.device
    ) -> torch.Tensor:
        return torch.arange(first, stop).expand(len(padding), -1)

    patch.setattr(cache, "_positions_of", positions_of)


def rows_are_swapped(patch: pytest.MonkeyPatch) -> None:
    """The tokens of two rows go to the planes in the other order."""
    original = cache._computed_tokens

    def computed_tokens(*arguments: Any) -> torch.Tensor | None:
        tokens = original(*arguments)
        return None if tokens is None else tokens.flip(0)

    patch.setattr(cache, "_computed_tokens", computed_tokens)


def all_columns_are_computed_again(patch: pytest.MonkeyPatch) -> None:
    """What was found cached is not looked for."""
    original = ops.admit

    def admit(*arguments: Any, skip_prefix_lookup: bool = False, **named: Any) -> Any:
        return original(*arguments, skip_prefix_lookup=True, **named)

    patch.setattr(ops, "admit", admit)


def token_ids_are_hidden(patch: pytest.MonkeyPatch) -> None:
    """All prompts of one length look alike, so that one finds another's prefix."""
    original = ops.admit
    patch.setattr(ops, "admit", lambda i, tokens, **named: original(i, [1] * len(tokens), **named))


def beams_are_not_reordered(patch: pytest.MonkeyPatch) -> None:
    """Each row goes on from itself."""
    patch.setattr(PlaneCache, "reorder_cache", lambda self, beam_idx: None)


def forks_come_after_the_end_of_their_parents(patch: pytest.MonkeyPatch) -> None:
    """Operations that wait for the next step are sent in the other order."""
    original = PlaneCache._begin

    def begin(self: PlaneCache, operations: list[Any]) -> Any:
        return original(self, [*reversed(operations[:-1]), operations[-1]])

    patch.setattr(PlaneCache, "_begin", begin)


def beams_share_a_sequence(patch: pytest.MonkeyPatch) -> None:
    """A row that is asked for twice is not forked for the second."""

    def select(self: PlaneCache, indices: list[int]) -> None:
        self._rows = [self._rows[index] for index in indices]

    patch.setattr(PlaneCache, "_select", select)


def rejected_tokens_stay(patch: pytest.MonkeyPatch) -> None:
    """A rollback reaches the control plane late by a token."""
    original = ops.truncate
    patch.setattr(ops, "truncate", lambda ids, nums: original(ids, [num + 1 for num in nums]))


def rollback_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The model forgets rejected tokens, the planes do not."""

    def crop(self: PlaneCache, tokens_to_remove: int) -> None:
        self._extent.num_columns += tokens_to_remove

    patch.setattr(PlaneCache, "crop", crop)


def candidates_are_found_cached(patch: pytest.MonkeyPatch) -> None:
    """Columns whose logits are wanted are left out, being cached."""
    original = PlaneCache._admit

    def admit(self: PlaneCache, ids: Any, padding: Any, logits_to_keep: Any) -> list[int]:
        return original(self, ids, padding, 1)

    patch.setattr(PlaneCache, "_admit", admit)


def copies_are_the_same_sequences(patch: pytest.MonkeyPatch) -> None:
    """A copy goes on in the sequences of the original."""

    def copied(self: PlaneCache, memo: Any) -> PlaneCache:
        model = self._model()
        assert model is not None
        copy = PlaneCache(model, **self._settings)
        copy._rows, copy._held.session = [replace(row) for row in self._rows], self._held.session
        copy._extent.num_columns = self._extent.num_columns
        return copy

    patch.setattr(PlaneCache, "__deepcopy__", copied)


CAUGHT_BY: dict[Fault, tuple[checks.Check, ...]] = {
    attention_is_nothing: checks.CHECKS,
    padding_is_computed: (checks.greedy_with_padding,),
    positions_count_padding: (checks.second_call,),
    rows_are_swapped: (checks.greedy_with_padding, checks.sampling, checks.beams),
    all_columns_are_computed_again: (checks.second_call,),
    token_ids_are_hidden: (checks.second_call,),
    beams_are_not_reordered: (checks.beams,),
    forks_come_after_the_end_of_their_parents: (checks.beams,),
    beams_share_a_sequence: (checks.beams,),
    rejected_tokens_stay: (checks.assisted,),
    rollback_is_forgotten: (checks.assisted,),
    candidates_are_found_cached: (checks.assisted,),
    copies_are_the_same_sequences: (checks.conversation,),
}
