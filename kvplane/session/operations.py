"""A session's operations one by one: each is a step of its own, and raises why it was not done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from kvplane import ops
from kvplane.results import StepResult
from kvplane.v1 import control_pb2 as pb


class SessionOperations(ABC):
    """Steps of one operation. ``Session.step`` runs many in one, and lets each fail by itself.

    All raise the operation's error (``kvplane.results.error_of``): PoolFullError for LATER, with
    the time to wait, and NeverFitsError for NEVER.
    """

    @abstractmethod
    async def _run_operation(self, operation: pb.Operation, timeout_s: float | None) -> StepResult:
        """A step of ``operation``."""

    async def admit(
        self,
        sequence_id: int,
        token_ids: ops.Tokens,
        *,
        num_compute_tokens: int | None = None,
        max_total_tokens: int = 0,
        skip_prefix_lookup: bool = False,
        fork_sequence_ids: ops.Column = (),
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> StepResult:
        """A step of one ``ops.admit``. With ``wait``, PoolFullError says that the admission stands
        in line: it is granted in the ``news`` of a later step.
        """
        operation = ops.admit(
            sequence_id,
            token_ids,
            num_compute_tokens=num_compute_tokens,
            max_total_tokens=max_total_tokens,
            skip_prefix_lookup=skip_prefix_lookup,
            fork_sequence_ids=fork_sequence_ids,
            wait=wait,
        )
        return await self._run_operation(operation, timeout_s)

    async def append(
        self,
        sequence_id: int,
        token_ids: ops.Tokens = (),
        num_slots: int = 0,
        *,
        first_position: int,
        num_lookahead_slots: int = 0,
        timeout_s: float | None = None,
    ) -> StepResult:
        """A step of one ``ops.append``. Raises PositionMismatchError too."""
        operation = ops.append(
            sequence_id,
            token_ids,
            num_slots,
            first_position=first_position,
            num_lookahead_slots=num_lookahead_slots,
        )
        return await self._run_operation(operation, timeout_s)

    async def truncate(
        self, sequence_id: int, num_tokens: int, *, timeout_s: float | None = None
    ) -> StepResult:
        """A step of one ``ops.truncate``."""
        return await self._run_operation(ops.truncate(sequence_id, num_tokens), timeout_s)

    async def fork(
        self, parent_sequence_id: int, sequence_id: int, *, timeout_s: float | None = None
    ) -> StepResult:
        """A step of one ``ops.fork``."""
        return await self._run_operation(ops.fork(parent_sequence_id, sequence_id), timeout_s)

    async def free(self, sequence_id: int, *, timeout_s: float | None = None) -> StepResult:
        """A step of one ``ops.free`` of one sequence."""
        return await self._run_operation(ops.free([sequence_id]), timeout_s)

    async def swap_out(
        self, sequence_ids: Iterable[int], *, timeout_s: float | None = None
    ) -> StepResult:
        """A step of one ``ops.swap_out``."""
        return await self._run_operation(ops.swap_out(sequence_ids), timeout_s)

    async def swap_in(
        self, sequence_ids: Iterable[int], *, timeout_s: float | None = None
    ) -> StepResult:
        """A step of one ``ops.swap_in``."""
        return await self._run_operation(ops.swap_in(sequence_ids), timeout_s)

    async def retain(
        self,
        token_ids: ops.Tokens,
        *,
        time_to_live_s: float,
        priority: int = ops.DEFAULT_PRIORITY,
        timeout_s: float | None = None,
    ) -> StepResult:
        """A step of one ``ops.retain``. Raises QuotaExceededError at the tenant's cap."""
        operation = ops.retain(token_ids, time_to_live_s=time_to_live_s, priority=priority)
        return await self._run_operation(operation, timeout_s)

    async def release(self, token_ids: ops.Tokens, *, timeout_s: float | None = None) -> StepResult:
        """A step of one ``ops.release``."""
        return await self._run_operation(ops.release(token_ids), timeout_s)

    async def forget(
        self, what: ops.Tokens | ops.Scope, *, force: bool = False, timeout_s: float | None = None
    ) -> StepResult:
        """A step of one ``ops.forget``. Raises BlockInUseError unless ``force`` is set."""
        return await self._run_operation(ops.forget(what, force=force), timeout_s)
