"""An engine's block manager on kvplane: nano-vllm's BlockManager, by the control plane.

Such engines ask an object of theirs for blocks: ``allocate`` a prompt, ``append`` a token, ``free``
a sequence. Here that object collects an engine's step and asks the control plane for all of it at
once; the answer has a plan, which the data plane runs with the engine's tensors. The model is a toy
of numpy.

    python examples/engine_adapter.py 127.0.0.1:50051
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

import numpy as np

from kvplane import Layout, Tensor, ops
from kvplane.results import Signed
from kvplane.sync import ControlClient, Execution, Session

VOCABULARY = 64
NUM_NEW_TOKENS = 24


@dataclass(eq=False)
class Sequence:
    """``tokens``: prompt and answer. The first ``num_computed`` have their keys and values."""

    id: int
    tokens: list[int]
    max_total_tokens: int
    num_computed: int = 0


@dataclass
class Step:
    """One step. ``batch``: sequences and numbers of tokens, in the order in which the plan computes
    them. ``refused``: sequences without room now.
    """

    plan: Signed | None
    batch: list[tuple[Sequence, int]] = field(default_factory=list)
    refused: list[Sequence] = field(default_factory=list)


class BlockManager:
    """Keeps block tables, reference counts, hashes and free lists in the control plane."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked: list[Sequence | None] = []
        self._operations: list[ops.Operation] = []

    def allocate(self, sequence: Sequence) -> None:
        """Allocate blocks for all tokens; those of a cached prefix are not computed again."""
        limit = sequence.max_total_tokens
        operation = ops.admit(sequence.id, sequence.tokens, max_total_tokens=limit)
        self._ask(operation, sequence)

    def append(self, sequence: Sequence) -> None:
        """Allocate a slot for the last token, in another block if need be."""
        last = len(sequence.tokens) - 1
        operation = ops.append(sequence.id, sequence.tokens[last:], 1, first_positions=last)
        self._ask(operation, sequence)

    def free(self, sequence: Sequence) -> None:
        """Free the sequence's blocks for others, who can also find their computed contents."""
        self._ask(ops.free(sequence.id), None)

    def commit(self) -> Step:
        """Send the step. Raises its errors, except for a lack of room."""
        asked, operations = self._asked, self._operations
        self._asked, self._operations = [], []
        answer = self._session.step(operations)
        step = Step(answer.plan)
        for sequence, result in zip(asked, answer.results, strict=True):
            for failure in result.failures:
                if sequence is None or not failure.is_later:
                    raise failure.error
                step.refused.append(sequence)
            if sequence is not None and not result.failures:
                if result.admit.num_scheduled_tokens:
                    sequence.num_computed = result.admit.num_cached_tokens
                step.batch.append((sequence, len(sequence.tokens) - sequence.num_computed))
        return step

    def _ask(self, operation: ops.Operation, sequence: Sequence | None) -> None:
        self._operations.append(operation)
        self._asked.append(sequence)


class Model:
    """A toy: keys and values follow from tokens, positions and the layers below; greedy answers."""

    def __init__(self, layout: Layout) -> None:
        group = layout.groups[0]
        self.shape = (group.num_kv_heads, group.head_size)
        size = group.num_kv_heads * group.head_size
        random = np.random.default_rng(7)
        self.embedding = random.standard_normal((VOCABULARY, size), np.float32)
        self.weights = random.standard_normal((len(group.layers), 3, size, size), np.float32) / size

    def inputs(self, hidden: np.ndarray, layer: int) -> tuple[np.ndarray, ...]:
        """Return query, key and value of a layer, each [tokens, heads, head size]."""
        return tuple((hidden @ w).reshape(-1, *self.shape) for w in self.weights[layer])

    def embed(self, tokens: list[int], positions: range) -> np.ndarray:
        """Return layer 0's input for the tokens at ``positions``: [positions, size]."""
        places = np.sin(np.outer(positions, 1 / np.arange(1, self.embedding.shape[1] + 1)))
        return self.embedding[[tokens[i] for i in positions]] + places.astype(np.float32)

    def answers(self, hidden: np.ndarray) -> np.ndarray:
        """Return the next token after each row."""
        return np.argmax(hidden @ self.embedding.T, axis=1)


class Engine:
    """Continuous batching. A prompt joins once there is room. If a running sequence then has no
    room, the youngest one starts again later, with the part that is still cached.
    """

    def __init__(self, model: Model, manager: BlockManager, execution: Execution) -> None:
        self.model, self.manager, self.execution = model, manager, execution
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preempted = 0

    def step(self) -> bool:
        """Compute a token of each sequence that can continue. Return whether there was a plan."""
        for sequence in self.running:
            self.manager.append(sequence)
        for sequence in self.waiting:
            self.manager.allocate(sequence)
        step = self.manager.commit()
        joined = [sequence for sequence, _ in step.batch if sequence in self.waiting]
        self.running += joined
        self.waiting = [sequence for sequence in self.waiting if sequence not in joined]
        if step.plan is not None:
            self.execution.start(step.plan)
            self._compute(step.batch)
        if any(sequence in self.running for sequence in step.refused):
            self.waiting.append(self.running.pop())
            self.manager.free(self.waiting[-1])
            self.num_preempted += 1
        return step.plan is not None

    def _compute(self, batch: list[tuple[Sequence, int]]) -> None:
        if not batch:
            return  # the plan only frees blocks
        spans = [range(s.num_computed, s.num_computed + count) for s, count in batch]
        hidden = np.concatenate(
            [self.model.embed(s.tokens, span) for (s, _), span in zip(batch, spans, strict=True)]
        )
        for layer in self.execution.layers:
            tensors = [Tensor.from_array(each) for each in self.model.inputs(hidden, layer)]
            attended = self.execution.layer(layer, *tensors).numpy()
            hidden = hidden + attended.reshape(hidden.shape)
        ends = np.cumsum([count for _, count in batch]) - 1
        for (sequence, _), token in zip(batch, self.model.answers(hidden[ends]), strict=True):
            sequence.num_computed = len(sequence.tokens)
            sequence.tokens.append(int(token))
            if len(sequence.tokens) == sequence.max_total_tokens:
                self.running.remove(sequence)
                self.manager.free(sequence)


def main(address: str, pool_id: str = "default", num_prompts: int = 3) -> list[list[int]]:
    """Serve prompts, the first two of which begin with the same 20 tokens."""
    starts = [[*range(20)] if i < 2 else [] for i in range(num_prompts)]
    prompts = [[*start, 30 + i, 7, 1 + i] for i, start in enumerate(starts)]
    served = [Sequence(i, p, len(p) + NUM_NEW_TOKENS) for i, p in enumerate(prompts, 1)]
    with (
        ControlClient(address) as control,
        control.open_session(pool_id, client_name="adapter") as session,
        session.open_execution() as execution,
    ):
        engine = Engine(Model(session.layout), BlockManager(session), execution)
        engine.waiting = [*served]
        while engine.waiting or engine.running:
            if not engine.step():
                time.sleep(0.01)  # others have all the room
    for sequence in served:
        print(f"sequence {sequence.id}: {sequence.tokens}")
    print(f"started again for lack of room: {engine.num_preempted}")
    return [sequence.tokens for sequence in served]


if __name__ == "__main__":
    main(*sys.argv[1:3])
