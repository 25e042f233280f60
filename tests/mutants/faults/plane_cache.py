"""Faults of the cache for generate."""

from __future__ import annotations

from tests.mutants.fault import Fault, first

CACHE, OPS = "kvplane/transformers/cache.py", "kvplane/ops.py"
CHECKS = ("greedy_with_padding", "second_call", "beams", "sampling", "assisted", "conversation")
FORKS = """\
            ids = list(self._planes.new_ids(len(self._rows)))
            copy._held.ids.update(ids)
            fork = ops.fork([row.sequence_id for row in self._rows], ids)
            copy._held.session = self._begin([*self._pending, fork])[0]
"""

FAULTS = tuple(
    Fault(f"{name}-{check}", file, old, new, f"tests/mutants/walks.py::test_plane_cache[{check}]")
    for name, file, old, new, checks in (
        (
            "attention_is_nothing",
            "kvplane/transformers/attention.py",
            "    return rows if tokens is None else rows[tokens]\n",
            "    return 0 * rows if tokens is None else 0 * rows[tokens]\n",
            CHECKS,
        ),
        (  # Padding counts as tokens of the prompt.
            "padding_is_computed",
            CACHE,
            "    if mask is None:\n        return [0] * num_rows",
            "    if True:\n        return [0] * num_rows",
            ("greedy_with_padding",),
        ),
        (  # Positions are columns, as without padding.
            "positions_count_padding",
            CACHE,
            "    columns = torch.arange(first, stop, device=device)\n",
            "    return torch.arange(first, stop).expand(len(padding), -1)\n",
            ("second_call",),
        ),
        (  # The tokens of two rows go to the planes in the other order.
            "rows_are_swapped",
            CACHE,
            "            for row, first in enumerate(first_columns)\n        ]\n    )",
            "            for row, first in enumerate(first_columns)\n        ]\n    ).flip(0)",
            ("greedy_with_padding", "sampling", "beams"),
        ),
        (  # What was found cached is not looked for.
            "all_columns_are_computed_again",
            OPS,
            "skip_prefix_lookup=skip_prefix_lookup,",
            "skip_prefix_lookup=True,",
            ("second_call",),
        ),
        (  # All prompts of one length look alike, so that one finds another's prefix.
            "token_ids_are_hidden",
            OPS,
            "            token_ids=pack_tokens(token_ids),\n            num_compute_tokens",
            "            token_ids=pack_tokens([1] * len(token_ids)),\n"
            "            num_compute_tokens",
            ("second_call",),
        ),
        (  # Each row goes on from itself.
            "beams_are_not_reordered",
            CACHE,
            "        self._select(beam_idx.tolist())\n",
            "        pass\n",
            ("beams",),
        ),
        (  # Operations that wait for the next step are sent in the other order.
            "forks_come_after_the_end_of_their_parents",
            CACHE,
            *first(
                "    def _begin(self, operations: list[ops.Operation])"
                " -> tuple[Session, list[OperationResult]]:",
                "operations = [*reversed(operations[:-1]), operations[-1]]",
            ),
            ("beams",),
        ),
        (  # A row that is asked for twice is not forked for the second.
            "beams_share_a_sequence",
            CACHE,
            *first(
                "    def _select(self, indices: list[int]) -> None:",
                "self._rows = [self._rows[index] for index in indices]",
                "return",
            ),
            ("beams",),
        ),
        (  # A rollback reaches the control plane late by a token.
            "rejected_tokens_stay",
            CACHE,
            "ops.truncate(ids, [row.num_tokens for row in self._rows])",
            "ops.truncate(ids, [row.num_tokens + 1 for row in self._rows])",
            ("assisted",),
        ),
        (  # The model forgets rejected tokens, the planes do not.
            "rollback_is_forgotten",
            CACHE,
            *first(
                "    def crop(self, tokens_to_remove: int) -> None:",
                "self._extent.num_columns += tokens_to_remove",
                "return",
            ),
            ("assisted",),
        ),
        (  # Columns whose logits are wanted are left out, being cached.
            "candidates_are_found_cached",
            CACHE,
            "last if isinstance(last, int) else 0)",
            "1)",
            ("assisted",),
        ),
        (  # A copy goes on in the sequences of the original.
            "copies_are_the_same_sequences",
            CACHE,
            FORKS,
            "            ids = [row.sequence_id for row in self._rows]\n"
            "            copy._held.session = self._held.session\n",
            ("conversation",),
        ),
    )
    for check in checks
)
