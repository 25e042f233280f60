"""What carries out one process's plans, as its settings say."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.config import EngineConfig
from kvplane.attention_options import AttentionOptions
from kvplane.clients.data_client import DataClient
from kvplane.clients.execution import Execution
from kvplane.errors import InternalError, InvalidRequestError
from kvplane.layout import Layout
from kvplane.shard import Shard
from kvplane.sync.loop_thread import LoopThread
from kvplane.tensor import Tensor
from kvplane.transformers.backend import DataBackend, OpenedSession, RemoteBackend, Started
from kvplane.transformers.region_layers import RegionLayers
from kvplane.transport.tls import TlsOptions
from kvplane.v1 import types_pb2 as pb


def backend_of(
    config: EngineConfig, layout: Layout, loop: LoopThread, rank: int = 0
) -> DataBackend:
    """Of one rank, 0 where there is one. Raises UnavailableError when an embedded data plane cannot
    register in time.
    """
    if config.data_plane == "embedded":
        return _embedded(config, layout, rank)
    if config.tensor_parallel == 1:
        return RemoteBackend(loop, config.timeout_s, config.client_tls)
    return RankBackend(loop, config.timeout_s, config.client_tls, rank, config.tensor_parallel)


def _embedded(config: EngineConfig, layout: Layout, rank: int) -> DataBackend:
    # It needs the data plane's own packages.
    from kvplane.transformers.embedded import EmbeddedBackend

    return EmbeddedBackend(
        layout,
        config.recovery_timeout_s,
        control_plane=config.control_plane,
        pool_id=config.pool_id,
        num_shards=config.tensor_parallel,
        shard_index=rank,
        num_device_blocks=config.num_device_blocks,
        num_host_blocks=config.num_host_blocks,
        num_threads=config.num_threads,
        control_plane_tls=config.planes_tls,
        control_plane_ca=config.planes_ca,
        control_plane_name=config.planes_name,
        control_plane_token_file=config.planes_token_file,
        tls_certificate=config.planes_certificate,
        tls_key=config.planes_key,
    )


class RankBackend:
    """One shard of a remote pool, whose heads are those that this rank computes."""

    def __init__(
        self,
        loop: LoopThread,
        timeout_s: float,
        tls: TlsOptions | None,
        rank: int,
        num_ranks: int,
    ) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._tls = tls
        self._rank = rank
        self._num_ranks = num_ranks
        self._client: DataClient | None = None
        self._execution: Execution | None = None
        self.latent_layers: frozenset[int] = frozenset()
        self._layers: RegionLayers | None = None

    def open(self, session: OpenedSession) -> None:
        """Open an Execute stream to the rank's shard. Raises InvalidRequestError of the field
        "tensor_parallel" for a pool that is not divided by heads among so many.
        """
        shard = Shard.of_heads(session.layout, self._rank, self._num_ranks)
        if [Shard.from_proto(info.shard) for info in session.shards][self._rank :][:1] != [shard]:
            raise InvalidRequestError(
                "must be the number of the pool's shards, which divide its KV heads evenly",
                field="tensor_parallel",
            )
        self.close()
        address = session.shards[self._rank].address
        client = self._client = self._loop.call(
            lambda: DataClient(address, tls=self._tls, timeout_s=self._timeout_s)
        )
        self._execution = self._loop.run(client.open(session.grant))
        self.latent_layers = session.layout.latent_layers
        self._layers = RegionLayers(self._execution)

    def start(self, plan: pb.SignedPayload, num_tokens: int = 0) -> Started:
        """Present the plan to the shard."""
        started = self._loop.run(self._open_execution().start(plan))
        return Started(started.num_tokens, [] if started.receipt is None else [started.receipt])

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Send one layer's new tokens, of the rank's heads, and wait for their attention."""
        assert value is not None, "keep_part refuses latents"
        if self._layers is not None:
            output = self._layers.layer(index, query, key, value, options)
            if output is not None:
                return output
        tensors = (
            Tensor.from_array(each.detach().cpu().contiguous()) for each in (query, key, value)
        )
        out = self._loop.run(self._open_execution().layer(index, *tensors, options=options))
        there: torch.Tensor = out.torch().to(query.device)
        return there

    def finish(self) -> Sequence[pb.SignedPayload]:
        """The receipt that came after the last layer. Raises InternalError when none did."""
        receipt = self._open_execution().receipt
        if receipt is None:
            raise InternalError("no receipt came after the last layer")
        return [receipt]

    def close(self) -> None:
        """Close stream and channel."""
        execution, self._execution, self._layers = self._execution, None, None
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
