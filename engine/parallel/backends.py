"""The backends that run one process's plans, by its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel

from kvplane.errors import InvalidRequestError
from kvplane.layout import Layout
from kvplane.results import ShardInfo, Signed
from kvplane.runtime.backend import DataBackend, OpenedSession, RemoteBackend
from kvplane.serving.config import memory_of
from kvplane.shard import Shard
from kvplane.sync.loop_thread import LoopThread
from kvplane.transport.tls import Tls
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1.types_pb2 import SignedPayload

from ..config import EngineSettings
from .group import RankGroup


@dataclass(frozen=True, slots=True)
class SharedSession:
    """A session that rank 0 opened, as a backend needs it, with all or only a rank's shards."""

    grant: Signed
    shards: Sequence[ShardInfo]
    layout: Layout

    def encode(self) -> bytes:
        """Encode the session as bytes, for ``decode`` on another rank."""
        return cpb.OpenSessionResponse(
            grant=cast(SignedPayload, self.grant), shards=[each.to_proto() for each in self.shards]
        ).SerializeToString()

    @classmethod
    def decode(cls, message: bytes, layout: Layout) -> SharedSession:
        """Decode a session from the result of ``encode``."""
        response = cpb.OpenSessionResponse.FromString(message)
        shards = [ShardInfo.from_proto(each) for each in response.shards]
        return cls(response.grant, shards, layout)


def device_of(config: EngineSettings, rank: int = 0) -> torch.device:
    """Return the device of a rank's model, and of its pool if that is embedded. Ranks share the
    first one's GPU where there are too few. Raises InvalidRequestError for the field "device"
    saying what is missing.
    """
    from data_plane.kernels.device.devices import choose_device, machine_of_torch, this_machine

    is_embedded = config.data_plane == "embedded"
    first = choose_device(config.device, this_machine if is_embedded else machine_of_torch)
    if first.type == "cpu":
        return first
    has_enough = first.index + config.tensor_parallel <= torch.cuda.device_count()
    return torch.device("cuda", first.index + rank * has_enough)


def captures_steps(config: EngineSettings, layout: Layout, device: torch.device) -> bool:
    """Return whether decode steps with an embedded pool are captured as CUDA graphs: on a GPU, but
    not with several ranks, which are sent each step, nor with states, which no fixed step serves.
    """
    is_plain = config.tensor_parallel == 1 and layout.state_group is None
    return config.graphs and device.type == "cuda" and is_plain


def group_of(config: EngineSettings, meeting: Path, rank: int = 0) -> RankGroup:
    """Join the ranks of an engine: see ``RankGroup``. Sums are by NCCL where each has a GPU."""
    devices = {device_of(config, each) for each in range(config.tensor_parallel)}
    has_own_gpus = len(devices) == config.tensor_parallel and config.tensor_parallel > 1
    return RankGroup(
        meeting,
        rank,
        config.tensor_parallel,
        config.recovery_timeout_s,
        gpu=device_of(config, rank) if has_own_gpus else None,
    )


def backend_of(
    config: EngineSettings,
    layout: Layout,
    loop: LoopThread,
    model: PreTrainedModel,
    rank: int = 0,
) -> DataBackend:
    """Return the backend of one rank, which is 0 when there is one. ``model``: the rank's part.

    An embedded pool whose size is not given takes what a step of the model leaves: raises
    NeverFitsError when that is nothing, and UnavailableError when it cannot register in time.
    """
    if config.data_plane == "embedded":
        return _embedded(config, layout, model, rank)
    if config.tensor_parallel == 1:
        return RemoteBackend(loop, config.call_timeout_s, config.client_tls)
    return RankBackend(loop, config.call_timeout_s, config.client_tls, rank, config.tensor_parallel)


def _embedded(
    config: EngineSettings, layout: Layout, model: PreTrainedModel, rank: int
) -> DataBackend:
    # It needs the data plane's own packages.
    from kvplane.runtime.embedded import EmbeddedBackend

    from ..running.step_memory import utilization_beside_step

    memory = memory_of(config.memory)
    if isinstance(memory, float) and not config.num_device_blocks:
        memory = utilization_beside_step(
            model,
            layout,
            utilization=memory,
            num_processes=sum(
                device_of(config, each) == model.device for each in range(config.tensor_parallel)
            ),
            max_batch_tokens=config.max_batch_tokens,
            max_sequences=config.max_sequences,
            graphs=captures_steps(config, layout, model.device),
        )
    return EmbeddedBackend(
        layout,
        config.recovery_timeout_s,
        memory=f"{100 * memory:.9f}%" if isinstance(memory, float) else config.memory,
        control_plane=config.control_plane,
        pool_id=config.pool_id,
        num_shards=config.tensor_parallel,
        shard_index=rank,
        device=str(model.device),
        num_device_blocks=config.num_device_blocks,
        num_host_blocks=config.num_host_blocks,
        num_threads=config.num_threads,
        tls=config.client_tls is not None,
        tls_ca=config.tls_ca,
        tls_name=config.tls_name,
        token_file=config.token_file,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
    )


class RankBackend(RemoteBackend):
    """Runs plans on one shard of a remote pool, with the heads that this rank computes."""

    def __init__(
        self,
        loop: LoopThread,
        timeout_s: float,
        tls: Tls | None,
        rank: int,
        num_ranks: int,
    ) -> None:
        super().__init__(loop, timeout_s, tls)
        self._rank = rank
        self._num_ranks = num_ranks

    def open(self, session: OpenedSession) -> None:
        """Open an Execute stream to the rank's shard. Raises InvalidRequestError for the field
        "tensor_parallel" for a pool that is not divided by heads among so many.
        """
        own = session.shards[self._rank :][:1]
        shard = Shard.of_heads(session.layout, self._rank, self._num_ranks)
        if [info.shard for info in own] != [shard]:
            raise InvalidRequestError(
                "must be the number of the pool's shards, which divide its KV heads evenly",
                field="tensor_parallel",
            )
        super().open(SharedSession(session.grant, own, session.layout))
