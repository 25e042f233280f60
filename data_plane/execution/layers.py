"""The model's layers that a shard holds: where each is among them."""

from __future__ import annotations

from collections.abc import Sequence

from data_plane.kernels.arguments import require
from kvplane.errors import InvalidRequestError


def layer_index(layers: Sequence[int], layer: int, prefix: str = "") -> int:
    """Return the index in the shard of one of the model's layers. Raises InvalidRequestError naming
    the field ``layer`` after ``prefix``.
    """
    try:
        return layers.index(layer)
    except ValueError:
        raise InvalidRequestError(
            f"layer {layer} is not in this shard, which has {list(layers)}",
            field=f"{prefix}layer",
        ) from None


def layer_range(layers: Sequence[int], first_layer: int, num_layers: int) -> range:
    """Return the indices in the shard of ``num_layers`` layers from the model's ``first_layer`` on;
    0 stands for all. Raises InvalidRequestError.
    """
    if num_layers == 0:
        require(first_layer == 0, "must be 0 where num_layers is 0", "first_layer")
        return range(len(layers))
    require(
        first_layer in layers,
        f"layer {first_layer} is not in this shard, which has {list(layers)}",
        "first_layer",
    )
    first = layers.index(first_layer)
    num_left = len(layers) - first
    require(
        1 <= num_layers <= num_left,
        f"must be 1 to {num_left}, the shard's layers from {first_layer} on, is {num_layers}",
        "num_layers",
    )
    return range(first, first + num_layers)
