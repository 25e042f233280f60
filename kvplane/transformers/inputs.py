"""Token ids for the control plane that differ wherever keys and values do.

Keys and values depend on images, sound and token types too. The control plane compares ids alone,
so tokens that such arguments of a forward pass change are given to it by other ids:

    id                         of a token that nothing changes: the model's
    id + ((1 + type) << n)     of a token with a type; n is 21, 24 or 27, by the argument's name
    2**30 | (id ^ word)        of eight tokens from the beginning of the block with the first
                               changed token; word: 30 of 240 bits of the arguments' digest

Every argument counts except those in ``_HARMLESS``. So an argument unknown to this file costs hits
but never finds the keys of another prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from kvplane.errors import InvalidRequestError

# Arguments that only choose the outputs, as all named output_* do, or that are checked elsewhere.
_HARMLESS: Final = frozenset(
    {"input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", "return_dict"}
    | {"labels", "logits_to_keep", "num_items_in_batch"}
)
_TYPES: Final = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
_TYPE_BITS: Final = 3
_ID_BITS: Final = 21
_MAX_TYPE: Final = (1 << _TYPE_BITS) - 2
_NUM_WORDS: Final = 8
_WORD_BITS: Final = 30
# Arguments with these parts in their names change tokens from the first placeholder on only.
_KINDS: Final = ("image", "video", "vision", "audio", "speech")
_MEDIA: Final = (*_KINDS, "pixel", "input_features", "feature_attention_mask", "mm_encoder_outputs")


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one forward pass, in the form of ids by which prefixes are found.

    ``ids``: int64 [num_rows, num_columns], with types. ``names``: the arguments behind ``words``,
    none where no tensors or numbers are given. ``changed``: the columns [first, stop) of each row
    that they may change, or whose features they carry.
    """

    ids: torch.Tensor
    has_types: bool
    names: tuple[str, ...]
    words: tuple[int, ...]
    changed: tuple[tuple[int, int], ...]

    def keys(
        self, padding: Sequence[int], positions: Sequence[int], block_size: int
    ) -> list[list[int]]:
        """Return each row's ids for the control plane. ``padding``: columns of each row to leave
        out; ``positions``: of each row's first token; ``block_size``: tokens of a block.
        """
        rows = [row[skip:] for row, skip in zip(self.ids.tolist(), padding, strict=True)]
        if self.words:
            for row, skip, position, (column, _) in zip(
                rows, padding, positions, self.changed, strict=True
            ):
                first = max(column - skip, 0)
                begin = max(first - (position + first) % block_size, 0)
                for i, word in zip(range(begin, len(row)), self.words, strict=False):
                    row[i] = (row[i] ^ word) | 1 << _WORD_BITS
        return rows

    def leave_out(self, kwargs: dict[str, Any], num_columns: int) -> int:
        """Leave the first ``num_columns`` out of ``kwargs``, or fewer. Returns how many.

        A model counts placeholders and features. Where all placeholders are left out, the features
        are too; where only some would be, columns from the first placeholder on stay.
        """
        if self.names and num_columns >= max(stop for _, stop in self.changed):
            kwargs.update(dict.fromkeys(self.names))
        elif self.names:
            num_columns = min(num_columns, *(first for first, _ in self.changed))
        for name in ("input_ids", *_TYPES):
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][:, num_columns:]
        return num_columns


def first_columns(kwargs: Mapping[str, Any], num_columns: int) -> dict[str, Any]:
    """Return the arguments of a pass over the first ``num_columns`` alone, without media."""
    cut = {
        name: kwargs[name][:, :num_columns]
        for name in ("input_ids", *_TYPES)
        if kwargs.get(name) is not None
    }
    return {**kwargs, **cut}


def inputs_of(model: PreTrainedModel, ids: torch.Tensor, kwargs: Mapping[str, Any]) -> Inputs:
    """Collect what a pass's keys and values depend on. ``ids``: int64 [num_rows, num_columns].
    Raises InvalidRequestError for types too large for an id, for arguments that are not tensors,
    numbers or text, and for images in a model that gives them positions of several dimensions.
    """
    keyed = ids
    for i, name in enumerate(_TYPES):
        types = kwargs.get(name)
        if types is not None:
            _check_types(name, types, ids)
            keyed = keyed + ((types.to(ids) + 1) << (_ID_BITS + i * _TYPE_BITS))
    digest, names = hashlib.sha256(), []
    for name in sorted(set(kwargs) - _HARMLESS - set(_TYPES)):
        leaves = () if name.startswith("output_") else _leaves(name, kwargs[name])
        for path, leaf in leaves:
            digest.update(f"{path}:{type(leaf).__name__}".encode())
            digest.update(_content(name, path, leaf))
            names += [name] if name not in names else []
    if not names:
        return Inputs(keyed, keyed is not ids, (), (), ())
    if hasattr(model.base_model, "get_rope_index"):
        raise InvalidRequestError(
            "is not served: the model gives images positions of several dimensions", field=names[0]
        )
    number = int.from_bytes(digest.digest(), "little")
    words = tuple(number >> i * _WORD_BITS & (1 << _WORD_BITS) - 1 for i in range(_NUM_WORDS))
    changed = _changed(model.config, ids, names)
    return Inputs(keyed, keyed is not ids, tuple(names), words, changed)


def wants_all_columns(config: PreTrainedConfig, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a pass returns something of every column besides logits, such as hidden
    states, by its arguments or by the config. Raises InvalidRequestError for attention weights.
    """
    wanted = {
        name.removeprefix("_")
        for each in (config, config.get_text_config())
        for name, value in vars(each).items()
        if value is True and name.removeprefix("_").startswith("output_")
    }
    for name, value in kwargs.items():
        if name.startswith("output_") and value is not None:
            wanted = wanted | {name} if value else wanted - {name}
    if "output_attentions" in wanted:
        raise InvalidRequestError(
            'must be false: attention "kvplane" makes no weights that it could return',
            field="output_attentions",
        )
    return bool(wanted)


def _check_types(name: str, types: torch.Tensor, ids: torch.Tensor) -> None:
    if types.shape != ids.shape or types.is_floating_point():
        raise InvalidRequestError(f"must be integers {list(ids.shape)}", field=name)
    if bool(((types < 0) | (types > _MAX_TYPE)).any()) or bool((ids >= 1 << _ID_BITS).any()):
        raise InvalidRequestError(
            f"must be from 0 to {_MAX_TYPE}, of token ids below {1 << _ID_BITS}", field=name
        )


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, numbers and texts inside of an argument, each with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _leaves(f"{path}.{i}", item)
    elif value is not None and not isinstance(value, Cache):
        yield path, value


def _content(name: str, path: str, leaf: Any) -> bytes:
    """Encode a leaf as bytes. They begin with its length, so two leaves are never read as one."""
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().cpu().reshape(-1)
        data: bytes = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return f":{leaf.dtype}:{list(leaf.shape)}\n".encode() + data
    if isinstance(leaf, bool | int | float | str):
        return f":{leaf!r}\n".encode()
    raise InvalidRequestError(
        f"holds a {type(leaf).__name__} ({path}): keys and values may depend on it, but only "
        "tensors, numbers and texts can be compared",
        field=name,
    )


def _changed(
    config: PreTrainedConfig, ids: torch.Tensor, names: Sequence[str]
) -> tuple[tuple[int, int], ...]:
    """Return each row's changed columns [first, stop): those of placeholders where the arguments
    are images or sound and every row has some; otherwise all.
    """
    num_rows, num_columns = ids.shape
    placeholders = torch.tensor(sorted(_placeholders(config)), dtype=ids.dtype, device=ids.device)
    is_placeholder = torch.isin(ids, placeholders)
    are_media = all(any(part in name for part in _MEDIA) for name in names)
    if not are_media or not bool(is_placeholder.any(dim=1).all()):
        return ((0, num_columns),) * num_rows
    columns = [row.nonzero()[:, 0].tolist() for row in is_placeholder]
    return tuple((of_row[0], of_row[-1] + 1) for of_row in columns)


def _placeholders(config: PreTrainedConfig) -> set[int]:
    """Return the token ids that the config names for images and sound, and those around them."""
    found: set[int] = set()
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            found |= _placeholders(value)
        elif name.endswith(("_token_id", "_token_index", "_patch_id")) and isinstance(value, int):
            found |= {value} if any(kind in name for kind in _KINDS) else set()
    return found
