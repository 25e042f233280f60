"""One step after another at the same addresses, so that all of a step's layers can be captured in a
CUDA graph once and replayed for each plan.

    capture     layer, once for each of the shard's layers: queues its write and its attention
    each plan   Executor.start ──► run(graph.replay) ──► Executor.receipt
                                    rows are filled, the graph is replayed, rows are emptied
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from data_plane.execution.layer_runner import LayerRunner, Result
from data_plane.execution.layers import layer_index
from data_plane.execution.shards.shard_kernels import ShardKernels, check_window
from data_plane.kernels.arguments import NumbersOfHeads, require
from data_plane.kernels.backends.cuda import is_capturing
from data_plane.plans.batches.fixed_rows import FixedRows, StepBounds
from data_plane.plans.sessions import RunningPlan
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.layout import Layout


class FixedStep:
    """The steps of one session, made by ``Executor.fixed_step``.

    ``layer`` may be called while a CUDA graph is captured; ``run`` may not. Outside of ``run`` the
    step has no rows: its layers, and replays of them, write nothing.
    """

    def __init__(
        self,
        session_id: int,
        bounds: StepBounds,
        *,
        layout: Layout,
        layers: Sequence[int],
        runner: LayerRunner,
        compute: ShardKernels,
        device: torch.device,
    ) -> None:
        memories = [compute.step_memory() for _ in layout.attention_groups]
        self._memories = [memory for memory in memories if memory is not None]
        if len(self._memories) < len(memories):
            raise InvalidRequestError(
                "the kernels of a CPU have no graphs: call the executor's layer", field="device"
            )
        self.session_id = session_id
        self.bounds = bounds
        self._layers = layers
        self._runner = runner
        self._compute = compute
        self._device = device
        block_size = layout.block_size_tokens
        with compute.computing():
            self._rows = [FixedRows(bounds, block_size, device) for _ in layout.attention_groups]
        self._of_heads: dict[tuple[AttentionOptions, int, int], NumbersOfHeads] = {}
        self._windows: list[set[int]] = [set() for _ in layout.attention_groups]
        # The widest windows that read no trimmed entry of the rows; None: no rows are trimmed.
        self._widest: list[int | None] = [None for _ in layout.attention_groups]
        self._called: defaultdict[int, set[int]] = defaultdict(set)  # layers, by tokens

    def layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        options: AttentionOptions = AttentionOptions(),
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queue a layer's write and attention over the rows that the step has when they run.

        Tensors are as for ``Executor.layer``, of as many tokens as the step has or more; the
        output has no values for the tokens beyond. ``out``: [num_tokens, num_heads,
        value_head_size], contiguous; allocated if not given. Layers come in ascending order, from
        the shard's first one on. Before a capture, each is called once with tensors of the same
        shapes, types and strides. Does not wait, and reads nothing back from the device.

        Raises InvalidRequestError naming the argument that does not fit.
        """
        index = layer_index(self._layers, layer)
        if index == 0:
            for memory in self._memories:
                memory.begin()
        compute, group = self._compute, self._compute.group_of_layer(index)
        rows = self._rows[group].padded(query.shape[0])
        attended = compute.options_of(index, options)
        require(
            attended.seen_blocks is None,
            "must be absent in a step whose graph is replayed with other sequences",
            "options.seen_blocks",
        )
        of_heads = self._numbers_of_heads(index, attended, query.shape[1])
        window = attended.sliding_window_tokens
        check_window(window, self._widest[group])
        memory, tensors = self._memories[group], (query, key, value)
        output = self._runner.queue(rows, memory, index, tensors, options, of_heads, out)
        self._windows[group].add(window)
        self._called[rows.num_tokens].add(index)
        return output

    def run(
        self,
        call: Callable[[], Result],
        *,
        plan_number: int,
        pass_index: int | None = None,
        num_tokens: int = 0,
    ) -> Result:
        """Fill the step's rows from the session's latest plan and call ``call``, which replays a
        graph of all layers on the caller's stream, or calls ``layer`` for each. Returns its result.

        ``plan_number`` and ``pass_index``: as for ``Executor.layer``. ``num_tokens``: of the
        layers' tensors; 0 for as many as the bounds have. Afterwards the plan has run, and
        ``Executor.receipt`` returns its receipt. If ``call`` raises, it can be run again.

        Raises InvalidRequestError naming the bound where the plan does not fit, which can then be
        run by ``Executor.layer``, and for a step whose layers were never all called;
        PlanOutOfOrderError if the plan has run; and as ``Executor.layer`` does.
        """
        num_tokens = num_tokens or self.bounds.num_tokens

        def queue(run: RunningPlan) -> Result:
            self._check_fits(run, num_tokens)
            try:
                self._load(run, num_tokens)
                result = call()
            finally:
                self._clear()
            self._check_all_called(num_tokens)
            return result

        return self._runner.run_all(self.session_id, plan_number, pass_index, queue)

    def _check_fits(self, run: RunningPlan, num_tokens: int) -> None:
        require(
            run.on_host[0].num_tokens <= num_tokens,
            f"the plan has {run.on_host[0].num_tokens} tokens, and the step {num_tokens}",
            "num_tokens",
        )
        for rows, windows, batch in zip(self._rows, self._windows, run.on_host, strict=True):
            rows.check_fits(batch)
            for window in windows:
                check_window(window, batch.max_window_tokens)

    def _load(self, run: RunningPlan, num_tokens: int) -> None:
        with self._compute.computing():
            for rows, batch in zip(self._rows, run.on_host, strict=True):
                rows.load(batch)
        self._widest = [batch.max_window_tokens for batch in run.on_host]
        for rows, memory in zip(self._rows, self._memories, strict=True):
            memory.check_room(rows.lengths(num_tokens))

    def _clear(self) -> None:
        self._widest = [None for _ in self._rows]
        with self._compute.computing():
            for rows in self._rows:
                rows.clear()

    def _check_all_called(self, num_tokens: int) -> None:
        missing = set(range(len(self._layers))) - self._called[num_tokens]
        if missing:
            raise InvalidRequestError(
                f"layer {self._layers[min(missing)]} was never called with {num_tokens} tokens",
                field="num_tokens",
            )

    def _numbers_of_heads(
        self, layer: int, options: AttentionOptions, num_heads: int
    ) -> NumbersOfHeads:
        """Return what options say of each head as tensors that live as long as the step: a graph
        uses them.
        """
        key = options, num_heads, self._compute.group_of_layer(layer)
        if key not in self._of_heads:
            has_some = bool(options.alibi_slopes or options.sinks or options.block_pattern)
            require(
                not (has_some and is_capturing(self._device)),
                "call each layer once before they are captured, so that its options are in memory",
                "options",
            )
            self._of_heads[key] = self._compute.numbers_of_heads(layer, options, num_heads)
        return self._of_heads[key]
