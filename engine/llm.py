"""The engine's interface: a model folder in, texts out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from kvplane.errors import InternalError, InvalidRequestError, UnavailableError
from kvplane.layout import ELEMENT_BYTES, Layout
from kvplane.models.hf import checkpoint_dtype, layout_from_hf
from kvplane.results import PoolInfo
from kvplane.runtime.backend import DataBackend
from kvplane.runtime.link import ControlLink
from kvplane.session import Session
from kvplane.sync.caller_loop import CallerLoop
from kvplane.wire.protocol import MAX_LAYER_BYTES
from kvplane.wire.v1 import types_pb2 as tpb

from .config import EngineSettings
from .models import loader
from .models.captured import CapturedDecoder
from .models.compiled import CompiledDecoder
from .models.loader import Message
from .parallel.backends import backend_of, captures_steps, device_of
from .parallel.leader import ParallelBackend
from .request import Delta, RequestOutput, SamplingParams
from .running.core import EngineCore
from .scheduling.checkpoints import CheckpointScheduler
from .scheduling.loading import LoadingCheckpointScheduler, LoadingScheduler
from .scheduling.scheduler import Scheduler
from .stats import EngineStats
from .threads import waiting

if TYPE_CHECKING:
    from kvplane.runtime.embedded import EmbeddedBackend

Prompt = str | Sequence[int]

_log = logging.getLogger("engine")


class LLM:
    """An engine for one model: it answers prompts, and its KV cache is behind a control plane and a
    data plane.

    ``LLM("models/recall").generate(["..."])``; keyword arguments are the fields of
    ``EngineSettings``. Raises UnavailableError when the pool is not ready in time and
    LayoutMismatchError when the pool is for another model. Close it, or use it as a context
    manager. Other threads may call ``abort``, ``give_up`` and ``is_ready``, and one of them
    ``encode`` and ``encode_chat``.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        self._connect(EngineSettings(model=Path(model), **settings))

    @classmethod
    def from_config(cls, config: EngineSettings) -> LLM:
        """Make an engine from settings that a program parsed."""
        llm = cls.__new__(cls)
        llm._connect(config)
        return llm

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer ``prompts``, which are texts or token ids, in their order.

        ``sampling_params``: one for all, or one for each. A prompt that cannot be served
        (NeverFitsError, PoolFullError) has its error in its own output, and the others continue.
        Raises InvalidRequestError naming ``prompts[i]`` before anything starts, and
        UnavailableError when a plane stays away for longer than ``recovery_timeout_s``.
        """
        request_ids = self._add_all(prompts, sampling_params)
        outputs: dict[str, RequestOutput] = {}
        may_arrive, self._core.may_arrive = self._core.may_arrive, False
        try:
            for _ in self._run(request_ids, outputs):
                pass
        finally:
            self._core.may_arrive = may_arrive
        return [outputs[request_id] for request_id in request_ids]

    def chat(
        self,
        conversations: Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, which are messages with a "role" and a "content", in the model's
        chat template. Otherwise it works like ``generate``; raises InvalidRequestError naming
        ``conversations[i]``.
        """
        prompts = [
            self._loaded.encode_chat(messages, field=f"conversations[{i}]")
            for i, messages in enumerate(conversations)
        ]
        return self.generate(prompts, sampling_params)

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """Answer as ``generate`` does, but yield what each step adds to each continuation. Request
        ids rise with the prompts.

        Closing the iterator aborts unfinished requests.
        """
        request_ids = self._add_all(prompts, sampling_params)
        yield from self._run(request_ids, {})

    # For a caller that adds requests while others run, such as a server.

    def submit(self, prompt: Prompt, params: SamplingParams) -> str:
        """Queue a prompt; return the request's id. ``max_tokens`` is cut to what the pool can ever
        hold. Raises InvalidRequestError naming ``prompt``.
        """
        token_ids = self._encode(prompt, field="prompt")
        self._core.check_prompt(token_ids, params, field="prompt")
        room = max(1, self._pool_slots() - len(token_ids) + 1)
        params = replace(params, max_tokens=min(params.max_tokens, room))
        return self._core.add_request(prompt if isinstance(prompt, str) else "", token_ids, params)

    def step(self) -> list[Delta]:
        """Run one step of the engine; returns what it added to the submitted requests."""
        deltas = self._core.step()
        if not self._core.has_work:
            self._core.settle()
        return deltas

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. Raises InvalidRequestError naming ``prompt``."""
        return self._encode(prompt, field="prompt")

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt of a conversation. Raises InvalidRequestError naming ``messages``."""
        return self._loaded.encode_chat(messages, field="messages")

    @property
    def has_work(self) -> bool:
        """Return whether ``step`` has something to do."""
        return self._core.has_work

    def take_output(self, request_id: str) -> RequestOutput | None:
        """Return the answer to a request that is done, once; None if it is not done."""
        return self._core.take_output(request_id)

    def abort(self, request_id: str) -> None:
        """End a request with its present output at the next step."""
        self._core.abort(request_id)

    def give_up(self) -> None:
        """Stop waiting for planes that are away, from now on."""
        self._core.give_up()

    def is_ready(self) -> Future[bool]:
        """Begin to ask whether the planes could serve requests now: ``ControlLink.is_ready``."""
        return self._link.is_ready()

    @property
    def device(self) -> torch.device:
        """Return the device that the model computes on."""
        return self._loaded.model.device

    @property
    def stats(self) -> EngineStats:
        """Return the engine's totals so far."""
        return self._core.stats

    def get_pool(self) -> PoolInfo:
        """Fetch the pool's layout, shards and usage from the control plane."""
        return self._link.get_pool()

    def get_counters(self) -> dict[str, int]:
        """Fetch the pool's counters from the control plane; see ``ControlClient.get_counters``."""
        return self._link.get_counters()

    def close(self) -> None:
        """Release all blocks and close the session. Harmless when called again."""
        self._closing.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _connect(self, config: EngineSettings) -> None:
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        _log.info("torch threads=%d %s", torch.get_num_threads(), waiting())
        self._closing = ExitStack()
        with self._closing:
            loop = CallerLoop("engine-planes")
            self._closing.callback(loop.close)
            is_embedded = config.data_plane == "embedded"
            plane = self._closing.enter_context(ExitStack())  # to end after the session
            self._link = ControlLink(
                loop, config.control_plane, config.pool_id, config.call_timeout_s, config.client_tls
            )
            self._closing.callback(self._link.close)
            pool = None if is_embedded else self._link.pool_layout(config.recovery_timeout_s)
            self._loaded, layout = _load(config, pool)
            self._link.namespace = self._loaded.namespace
            self._backend: DataBackend
            if config.tensor_parallel == 1:
                self._backend = backend_of(config, layout, loop, self._loaded.model)
            else:
                self._backend = ParallelBackend(config, layout, loop, self._loaded.model)
            plane.callback(self._backend.stop)
            if is_embedded:
                self._link.pool_layout(config.recovery_timeout_s)  # until its shards are there
            self._backend.open(self._link.open(layout))
            self._core = _core(config, layout, self._loaded, self._link, self._backend)
            self._num_slots = 0
            self._sized_by: Session | None = None
            _log.info("pool has room for tokens=%d", self._pool_slots())
            self._closing = self._closing.pop_all()

    def _add_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[str]:
        """Queue all prompts, or none if one is invalid; returns their requests' ids."""
        if isinstance(prompts, str):
            raise InvalidRequestError("must be a list of prompts", field="prompts")
        params = _params_of_each(sampling_params, len(prompts))
        tokens = [self._encode(p, field=f"prompts[{i}]") for i, p in enumerate(prompts)]
        for i, ids in enumerate(tokens):
            self._core.check_prompt(ids, params[i], field=f"prompts[{i}]")
        texts = [p if isinstance(p, str) else "" for p in prompts]
        return [
            self._core.add_request(text, ids, each)
            for text, ids, each in zip(texts, tokens, params, strict=True)
        ]

    def _pool_slots(self) -> int:
        """Return the number of tokens that the pool can hold, or could when a session was last
        open: while the planes are away there is no session, and the next step waits for them.
        """
        with suppress(InternalError, UnavailableError):
            session = self._link.session
            if session is not self._sized_by:
                pool = self._link.get_pool()
                num_blocks = next(
                    tier.num_blocks for tier in pool.usage if tier.tier == tpb.TIER_DEVICE
                )
                self._num_slots = num_blocks * session.layout.block_size_tokens
                self._sized_by = session
        return self._num_slots

    def _encode(self, prompt: Prompt, *, field: str) -> list[int]:
        if isinstance(prompt, str):
            return self._loaded.encode(prompt, field=field)
        return list(prompt)

    def _run(
        self,
        request_ids: list[str],
        outputs: dict[str, RequestOutput],
    ) -> Iterator[Delta]:
        """Step until all of ``request_ids`` are in ``outputs``; yields deltas as they come."""
        open_ids = set(request_ids)
        try:
            while open_ids:
                deltas = self._core.step()
                for request_id in list(open_ids):
                    output = self._core.take_output(request_id)
                    if output is not None:
                        outputs[request_id] = output
                        open_ids.discard(request_id)
                yield from deltas
        finally:
            for request_id in open_ids:
                self._core.abort(request_id)
        while self._core.has_work:
            self._core.step()
        self._core.settle()


def _core(
    config: EngineSettings,
    layout: Layout,
    loaded: loader.LoadedModel,
    link: ControlLink,
    backend: DataBackend,
) -> EngineCore:
    if config.data_plane == "remote":
        _check_batch(config.max_batch_tokens, layout, loaded.num_heads)
    elif captures_steps(config, layout, loaded.model.device):
        own = cast("EmbeddedBackend", backend)
        most = config.max_sequences, loaded.max_total_tokens
        loaded = replace(loaded, decoder=CapturedDecoder(loaded.model, own, *most))
    settings: dict[str, Any] = {
        "block_size_tokens": layout.block_size_tokens,
        "max_batch_tokens": config.max_batch_tokens,
        "max_sequences": config.max_sequences,
    }
    has_states = loaded.states is not None
    scheduler: type[Scheduler] = CheckpointScheduler if has_states else Scheduler
    if has_states:
        settings["every_blocks"] = config.checkpoint_every_blocks
    if link.has_file_tier:
        settings["load"] = link.begin_load
        scheduler = LoadingCheckpointScheduler if has_states else LoadingScheduler
    return EngineCore(
        loaded,
        layout,
        link,
        backend,
        scheduler(**settings),
        recovery_timeout_s=config.recovery_timeout_s,
        max_plan_s=config.max_plan_s,
    )


def _check_batch(max_batch_tokens: int, layout: Layout, num_heads: int) -> None:
    """Raise InvalidRequestError if a layer of a full batch would not fit a message."""
    sizes = [
        num_heads * group.head_size + group.num_kv_heads * sum(group.stored_sizes)
        for group in layout.groups
    ]
    most = MAX_LAYER_BYTES // (max(sizes) * ELEMENT_BYTES[layout.dtype])
    if max_batch_tokens > most:
        raise InvalidRequestError(
            f"must be at most {most}, is {max_batch_tokens}: the tensors of a layer go to the data "
            "plane in one message",
            field="max_batch_tokens",
        )


def _load(config: EngineSettings, pool: Layout | None) -> tuple[loader.LoadedModel, Layout]:
    """Load the model and its layout. Block size and types are the pool's unless the settings set
    them. Scales, and whether latents are kept, are always the pool's, because it decides how values
    are stored. ``pool``: None for one that is yet to be embedded.
    """
    dtype, kv_dtype = config.dtype, config.kv_dtype
    if dtype == "auto":
        dtype = checkpoint_dtype(config.model) if pool is None else pool.dtype
    if kv_dtype == "auto":
        kv_dtype = dtype if pool is None else pool.kv_dtype
    device = device_of(config)
    if config.compile and device.type == "cuda":
        raise InvalidRequestError(
            f"is for a CPU, and the model is on {device}, where decode steps are captured as CUDA "
            "graphs",
            field="compile",
        )
    latent = _embeds_latents(config, device) if pool is None else bool(pool.latent_layers)
    packs = config.linears == "packed"
    loaded = loader.load(
        config.model,
        dtype,
        probe=config.probe,
        latent=latent,
        packs=packs,
        max_total_tokens=config.max_total_tokens,
        device=device if config.tensor_parallel == 1 else torch.device("cpu"),
    )
    if loaded.states is not None and (config.compile or config.tensor_parallel > 1):
        raise InvalidRequestError(
            "is not served for a model with running states",
            field="compile" if config.compile else "tensor_parallel",
        )
    if device.type != "cpu":  # kernels of a CPU round otherwise: it finds nothing of a GPU's
        kinds = filter(None, (loaded.namespace, device.type))
        loaded = replace(loaded, namespace="-".join(kinds))
    _log.info("model device=%s", device)
    layout = layout_from_hf(
        config.model,
        block_size_tokens=config.block_size_tokens if pool is None else pool.block_size_tokens,
        dtype=dtype,
        kv_dtype=kv_dtype,
        groups=loaded.groups,
    )
    if config.compile:
        latent = bool(layout.latent_layers)
        decoder = CompiledDecoder(loaded.model, config.max_sequences, latent=latent, packed=packs)
        loaded = replace(loaded, decoder=decoder)
    return loaded, layout if pool is None else layout.with_scales_of(pool)


def _embeds_latents(config: EngineSettings, device: torch.device) -> bool:
    from kvplane.runtime.embedded import serves_latents

    return config.latent and serves_latents(str(device))


def _params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequestError(
            f"must be one for all prompts, or one for each of the {num_prompts}: got {len(params)}",
            field="sampling_params",
        )
    return list(params)
