"""A backend of torch.compile for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Graphs:
    """Runs graphs as they are. ``num``: graphs that were made; ``num_runs``: runs of them;
    ``num_inputs``: tensors that the last one takes, without its constants.
    """

    def __init__(self) -> None:
        self.num = self.num_runs = self.num_inputs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.num += 1
        self.num_inputs = len(inputs)

        def run(*inputs: Any) -> Any:
            self.num_runs += 1
            return graph.forward(*inputs)

        return run
