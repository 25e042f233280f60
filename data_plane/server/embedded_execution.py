"""An execution in the data plane's process, with the calls of ``kvplane.sync.Execution``."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, cast

import torch

from data_plane.execution.executor import Executor
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InternalError, InvalidRequestError
from kvplane.results import Signed
from kvplane.wire.v1.types_pb2 import SignedPayload


class ExecutedSession(Protocol):
    """The part of a session that an execution needs; a ``kvplane.sync.Session`` has it."""

    @property
    def grant(self) -> Signed:
        """The session's signed rights at a data plane."""
        ...

    def add_receipt(self, receipt: Signed | None) -> None:
        """Submit a receipt with the next step."""
        ...


class EmbeddedExecution:
    """Made by ``EmbeddedDataPlane.open_execution``. One call at a time: ``start``, then ``layer``
    for each of ``layers``. Its tensors are torch's, on the executor's device, and calls run in the
    caller's thread.

    ``layers``: the layers held, ascending. ``num_tokens``: tokens that the plan or pass started
    last computes. ``receipts``: one, once the plan started last has run; the session has it then.
    """

    def __init__(self, executor: Executor, session: ExecutedSession) -> None:
        self.layers = list(executor.layers)
        self.latent_layers = executor.layout.latent_layers
        self.num_tokens = 0
        self.receipts: list[Signed] = []
        self._executor = executor
        self._session = session
        self._session_id = executor.open(cast(SignedPayload, session.grant))
        self._plan_number = 0
        self._pass_index: int | None = None
        self._last_taken = 0  # number of the plan whose receipt the session has

    def __enter__(self) -> EmbeddedExecution:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def has_run(self) -> bool:
        """Whether the plan started last has its receipt: no layer is expected any more."""
        return bool(self.receipts)

    def start(self, plan: Signed | None, *, pass_index: int | None = None) -> None:
        """Change tables and run transfers, and begin a pass if one is given: see
        ``Executor.start`` and ``Executor.begin_pass``. Raises InvalidRequestError for None, the
        plan of a step that changed nothing.
        """
        if plan is None:
            raise InvalidRequestError("is None: the step has nothing to carry out", field="plan")
        self.receipts = []
        started = self._executor.start(self._session_id, cast(SignedPayload, plan))
        self._plan_number, self._pass_index = started.number, pass_index
        self.num_tokens = started.num_tokens
        if pass_index is not None:
            self.num_tokens = self._executor.begin_pass(
                self._session_id, pass_index, plan_number=started.number
            )
        self._take(started.receipt)

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions = AttentionOptions(),
    ) -> torch.Tensor:
        """Write one layer's keys and values, then attend: [num_tokens, num_heads, value_head_size].
        The last layer waits until the plan or pass has run.
        """
        output = self._executor.layer(
            self._session_id,
            index,
            query,
            key,
            value,
            options=options,
            plan_number=self._plan_number,
            pass_index=self._pass_index,
        )
        if output is None:
            raise InternalError("a layer with queries has no output")
        if index == self.layers[-1]:
            self._take(self._executor.receipt(self._session_id))
        return output

    def close(self) -> None:
        """Forget the plan. Another execution can continue it."""
        self._plan_number, self.num_tokens, self.receipts = 0, 0, []

    def _take(self, receipt: Signed | None) -> None:
        if receipt is None:
            return
        self.receipts = [receipt]
        if self._plan_number != self._last_taken:
            self._last_taken = self._plan_number
            self._session.add_receipt(receipt)
