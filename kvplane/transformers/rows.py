"""The rows of a batch that a model computes, and the sequences behind them.

Rows are padded on the left. What the model calls a column is, in the sequence of a row, the
position ``column - num_padding``:

    columns       0       num_padding              num_columns
    row           | padding | positions 0, 1, 2 ... | the next forward pass
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvplane.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its sequence, which has ``num_tokens`` tokens once all columns are computed."""

    sequence_id: int
    num_padding: int
    num_tokens: int


def padding_of(mask: torch.Tensor | None, num_rows: int, num_columns: int) -> list[int]:
    """Columns of padding at the left of each row. Raises InvalidRequestError for a mask that is not
    [num_rows, num_columns] of 0 and then 1, at least one.
    """
    if mask is None:
        return [0] * num_rows
    if mask.shape != (num_rows, num_columns):
        raise InvalidRequestError(
            f"must be [{num_rows}, {num_columns}], all columns so far and the new ones, is "
            f"{list(mask.shape)}",
            field="attention_mask",
        )
    seen = mask.bool()
    padding = num_columns - seen.sum(dim=1)
    if not torch.equal(seen, torch.arange(num_columns, device=mask.device) >= padding[:, None]):
        raise InvalidRequestError("must have padding on the left alone", field="attention_mask")
    if bool((padding == num_columns).any()):
        raise InvalidRequestError("has a row of padding alone", field="attention_mask")
    return [int(num) for num in padding.tolist()]


def positions_of(
    given: torch.Tensor | None, padding: Sequence[int], first: int, stop: int, device: torch.device
) -> torch.Tensor:
    """Positions of columns [first, stop) in their sequences, int64 [num_rows, stop - first]; 0 in
    padding. Raises InvalidRequestError when others were ``given``: what is cached would be wrong.
    """
    columns = torch.arange(first, stop, device=device)
    positions = columns - torch.tensor(padding, device=device)[:, None]
    if given is not None:
        is_right = given.dim() == 2 and given.shape[1] == stop - first
        if not is_right or not bool(((given == positions) | (positions < 0)).all()):
            raise InvalidRequestError(
                "must count the tokens of each row from 0, padding left out", field="position_ids"
            )
    return positions.clamp_(min=0)


def computed_tokens(
    first_columns: Sequence[int], start: int, stop: int, device: torch.device
) -> torch.Tensor | None:
    """Of columns [start, stop) of each row those from its first column on, as indices into rows one
    after another; None for all.
    """
    if all(first == start for first in first_columns):
        return None
    width = stop - start
    return torch.cat(
        [
            torch.arange(row * width + first - start, (row + 1) * width, device=device)
            for row, first in enumerate(first_columns)
        ]
    )
