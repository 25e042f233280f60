"""What carries out plans: the engine's only access to keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvplane.attention_options import AttentionOptions
from kvplane.clients.data_client import DataClient
from kvplane.clients.execution import Execution
from kvplane.errors import InternalError, InvalidRequestError
from kvplane.session import Session
from kvplane.sync.loop_thread import LoopThread
from kvplane.tensor import Tensor
from kvplane.transport.tls import TlsOptions
from kvplane.v1 import types_pb2 as pb


@dataclass(frozen=True, slots=True)
class Started:
    """A plan was started. ``receipt`` is set already when it has nothing to compute."""

    num_tokens: int
    receipt: pb.SignedPayload | None


class DataBackend(Protocol):
    """Carries out the plans of one session, one at a time: ``start``, each layer in order,
    ``finish``.
    """

    @property
    def latent_layers(self) -> frozenset[int]:
        """As in ``kvplane.transformers.attention.Step``; of the session."""
        ...

    def open(self, session: Session) -> None:
        """Serve ``session`` from now on, and no other."""
        ...

    def start(self, plan: pb.SignedPayload) -> Started:
        """Start a plan."""
        ...

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """As in ``kvplane.transformers.attention.Step``."""
        ...

    def finish(self) -> pb.SignedPayload:
        """The receipt, after the last layer."""
        ...

    def close(self) -> None:
        """Forget the session; another may be opened. Harmless when called again."""
        ...

    def stop(self) -> None:
        """Release everything; nothing is opened afterwards."""
        ...


class RemoteBackend:
    """A data plane in another process: tensors travel as bytes over one Execute stream."""

    def __init__(self, loop: LoopThread, timeout_s: float, tls: TlsOptions | None = None) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._tls = tls
        self._client: DataClient | None = None
        self._execution: Execution | None = None

    def open(self, session: Session) -> None:
        """Open an Execute stream to the session's data plane. Raises InvalidRequestError for a pool
        of several shards.
        """
        if len(session.shards) != 1:
            raise InvalidRequestError(
                f"has {len(session.shards)} shards: this engine needs a pool of one",
                field="pool_id",
            )
        self.close()
        address = session.shards[0].address
        client = self._loop.call(
            lambda: DataClient(address, tls=self._tls, timeout_s=self._timeout_s)
        )
        self._client = client
        self._execution = self._loop.run(client.open(session.grant))

    def start(self, plan: pb.SignedPayload) -> Started:
        """Present the plan to the data plane."""
        started = self._loop.run(self._open_execution().start(plan))
        return Started(started.num_tokens, started.receipt)

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Send one layer's new tokens and wait for its attention."""
        tensors = (
            None if each is None else Tensor.from_array(each.detach().cpu().contiguous())
            for each in (query, key, value)
        )
        out = self._loop.run(self._open_execution().layer(index, *tensors, options=options))
        there: torch.Tensor = out.torch().to(query.device)
        return there

    def finish(self) -> pb.SignedPayload:
        """The receipt that came after the last layer. Raises InternalError when none did."""
        receipt = self._open_execution().receipt
        if receipt is None:
            raise InternalError("no receipt came after the last layer")
        return receipt

    def close(self) -> None:
        """Close stream and channel."""
        execution, self._execution = self._execution, None
        client, self._client = self._client, None
        if execution is not None:
            self._loop.run(execution.close())
        if client is not None:
            self._loop.run(client.close())

    def stop(self) -> None:
        """Close the session: there is nothing else to release."""
        self.close()

    def _open_execution(self) -> Execution:
        if self._execution is None:
            raise InternalError("no session is open")
        return self._execution
