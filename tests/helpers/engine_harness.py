"""Both planes' cores and an engine in one process, with no socket between them.

The control plane's core and the data plane's executor are the real ones; only the wire is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from control_plane.core import ControlPlane, CoreConfig
from control_plane.observing import PoolObservation
from data_plane import Executor
from engine.models import loader
from engine.models.captured import CapturedDecoder
from engine.request import Delta, RequestOutput, SamplingParams
from engine.running.core import EngineCore
from engine.scheduling.scheduler import Scheduler
from kvplane.errors import KvplaneError, SessionNotFoundError, StaleError
from kvplane.layout import Layout
from kvplane.models.hf import layout_from_hf
from kvplane.results import SequenceState, StepResult
from kvplane.runtime.backend import PlanStarted
from kvplane.runtime.embedded import EmbeddedBackend
from kvplane.wire import protocol
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import pool_pb2
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1 import types_pb2 as types

POOL = "pool"
TENANT = "default"
VOCABULARY = 97

LLAMA = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def save_model(config: PreTrainedConfig, folder: Path) -> Path:
    """Save a random model in which attention matters and few tokens repeat."""
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    made.save_pretrained(folder)
    return folder


class Planes:
    """A registered pool."""

    def __init__(
        self, layout: Layout, num_device_blocks: int, num_host_blocks: int, device: str = "cpu"
    ) -> None:
        self.now_s = 0.0
        self.noticed: set[int] = set()  # sessions that have news
        self.layout = layout
        self.executor = Executor(
            layout,
            pool_id=POOL,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            device=device,
            num_threads=1,
        )
        self.restart_control_plane(incarnation=1)

    def restart_control_plane(self, incarnation: int) -> None:
        """Start another run of it, which learns of the pool from the executor's report."""
        self.core = ControlPlane(
            incarnation=incarnation, config=CoreConfig(), clock=lambda: self.now_s
        )
        executor = self.executor
        welcome = self.core.register(
            rpb.Hello(
                version="test",
                oldest_payload_version=protocol.OLDEST_PAYLOAD_VERSION,
                newest_payload_version=protocol.NEWEST_PAYLOAD_VERSION,
                pool_id=POOL,
                shard=executor.shard.to_proto(),
                epoch=executor.epoch,
                layout=self.layout.to_proto(),
                num_device_blocks=executor.pools.num_blocks[types.TIER_DEVICE],
                num_host_blocks=executor.pools.num_blocks[types.TIER_HOST],
                address="nowhere:1",
                incarnation=executor.incarnation,
                key_id=executor.key_id,
            )
        )
        executor.install(welcome.incarnation, welcome.key)
        for part in executor.report():
            self.core.report(POOL, 0, executor.epoch, part)

    def pump(self) -> None:
        """Carry the control plane's messages to the executor, and its answers back."""
        for message in self.core.take_outgoing(POOL, 0):
            if message.HasField("publish"):
                self.executor.publish(message.publish.publications)
            if message.HasField("fence"):
                self.executor.fence(message.fence.session, message.fence.ordinal)
                done = rpb.FenceDone(session=message.fence.session)
                self.core.fence_done(POOL, 0, self.executor.epoch, done)

    def pool(self) -> pool_pb2.GetPoolResponse:
        return self.core.get_pool(POOL)

    def observed(self) -> PoolObservation:
        return self.core.observe_pool(POOL)

    def check_integrity(self) -> None:
        self.core.check_integrity()
        self.executor.check_integrity()


@dataclass
class OpenedSession:
    ref: types.SessionRef
    grant: types.SignedPayload
    layout: Layout

    @property
    def id(self) -> int:
        return self.ref.session_id


class Link:
    """Works as ``kvplane.runtime.link.ControlLink``, with the core behind it. ``faults``: raised by
    steps, one each, before the control plane has them.
    """

    def __init__(self, planes: Planes) -> None:
        self.planes = planes
        self.receipts: list[types.SignedPayload] = []
        self.number = 0
        self.last_plan_number = 0
        self.steps: list[list[pb.Operation]] = []
        self.results: list[StepResult] = []
        self.faults: list[Exception] = []
        self.session: Any = None

    def open(self, layout: Layout, timeout_s: float | None = None) -> OpenedSession:
        core = self.planes.core
        if self.session is not None:
            with suppress(SessionNotFoundError, StaleError):
                core.close_session(self.session.ref, TENANT)
        opened = core.open_session(
            pb.OpenSessionRequest(pool_id=POOL, layout=layout.to_proto(), client_name="test"),
            TENANT,
        )
        self.number, self.receipts = 0, []
        self.session = OpenedSession(opened.session, opened.grant, layout)
        self.planes.pump()
        return self.session

    def begin_step(self, operations: Sequence[pb.Operation]) -> Future[StepResult]:
        """Have the control plane answer at once; the engine reads the answer when it waits."""
        answer: Future[StepResult] = Future()
        try:
            answer.set_result(self._step(operations))
        except KvplaneError as error:
            answer.set_exception(error)
        return answer

    def _step(self, operations: Sequence[pb.Operation]) -> StepResult:
        if self.faults:
            raise self.faults.pop(0)
        request = pb.StepRequest(operations=operations)
        result = StepResult(self._call(self.planes.core.step, request))
        self.steps.append(list(operations))
        self.results.append(result)
        if result.plan is not None:
            self.last_plan_number = self.number
        return result

    def has_news(self, wait_s: float) -> bool:
        self.planes.noticed.update(session_id for session_id, _ in self.planes.core.take_news())
        has_news = self.session.id in self.planes.noticed
        self.planes.noticed.discard(self.session.id)
        return has_news

    def add_receipts(self, receipts: Iterable[types.SignedPayload]) -> None:
        self.receipts.extend(receipts)

    def submit_receipts(self) -> None:
        self._call(self.planes.core.step, pb.StepRequest())

    def abort_last_plan(self) -> list[SequenceState]:
        request = pb.AbortPlansRequest(plan_number=self.last_plan_number)
        return SequenceState.all_from_proto(
            self._call(self.planes.core.abort_plans, request).sequences
        )

    def _call(self, method: Callable[[Any, str], Any], request: Any) -> Any:
        """Fill in who, when and the receipts; a failure uses up the number as well."""
        request.session.CopyFrom(self.session.ref)
        self.number += 1
        request.number = self.number
        request.receipts.extend(self.receipts)
        response = method(request, TENANT)
        self.receipts = []
        self.planes.pump()
        return response


class Backend(EmbeddedBackend):
    """An engine's backend on the planes' executor, without a server.

    ``faults``: raised, one each, by the layers that are counted up to.
    """

    def __init__(self, planes: Planes) -> None:
        self._executor = planes.executor
        self._execution = None
        self.faults: dict[int, Exception] = {}
        self.num_layers_run = 0
        self.batch_sizes: list[int] = []

    def start(
        self, plan: types.SignedPayload, num_tokens: int = 0, pass_index: int | None = None
    ) -> PlanStarted:
        started = super().start(plan, num_tokens, pass_index)
        self.batch_sizes.append(started.num_tokens)
        return started

    def layer(self, *tensors: Any, **options: Any) -> torch.Tensor:
        self.num_layers_run += 1
        if self.num_layers_run in self.faults:
            raise self.faults.pop(self.num_layers_run)
        return super().layer(*tensors, **options)


@lru_cache(maxsize=4)
def loaded(folder: Path, max_total_tokens: int, device: str = "cpu") -> loader.LoadedModel:
    """Load a model, which no engine changes. What the probe does is tested in tests/models."""
    return loader.load(
        folder,
        "float32",
        probe=False,
        max_total_tokens=max_total_tokens,
        device=torch.device(device),
    )


ENGINES: list[Engine] = []
"""Those that were made since they were last checked."""


@dataclass
class Engine:
    """An engine core over ``planes``."""

    folder: Path
    num_device_blocks: int = 64
    num_host_blocks: int = 16
    max_batch_tokens: int = 64
    max_sequences: int = 16
    block_size_tokens: int = 8
    recovery_timeout_s: float = 1.0
    plans_ahead: bool = True
    max_plan_s: float = 0.0
    max_total_tokens: int = 0
    device: str = "cpu"
    graphs: bool = False
    """Whether decode steps are captured, on a GPU."""
    shared_with: Engine | None = None
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    deltas: list[Delta] = field(default_factory=list)
    asked: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    """The prompts, and how many tokens each may get."""

    def __post_init__(self) -> None:
        ENGINES.append(self)
        layout = layout_from_hf(self.folder, block_size_tokens=self.block_size_tokens)
        other = self.shared_with
        self.planes = (
            other.planes
            if other is not None
            else Planes(layout, self.num_device_blocks, self.num_host_blocks, self.device)
        )
        self.link = Link(self.planes)
        self.backend = Backend(self.planes)
        self.scheduler = Scheduler(
            block_size_tokens=layout.block_size_tokens,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=self.max_sequences,
        )
        self.backend.open(self.link.open(layout))
        model = loaded(self.folder, self.max_total_tokens, self.device)
        if self.graphs:
            most = self.max_sequences, model.max_total_tokens
            self.decoder = CapturedDecoder(model.model, self.backend, *most)
            model = replace(model, decoder=self.decoder)
        self.core = EngineCore(
            model,
            layout,
            self.link,  # type: ignore[arg-type]
            self.backend,  # type: ignore[arg-type]
            self.scheduler,
            recovery_timeout_s=self.recovery_timeout_s,
            plans_ahead=self.plans_ahead,
            max_plan_s=self.max_plan_s,
        )

    def add(self, prompt: list[int], **params: Any) -> str:
        request_id = self.core.add_request("", prompt, SamplingParams(**params))
        self.asked[request_id] = prompt, SamplingParams(**params).max_tokens
        return request_id

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.deltas += self.core.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def tokens(self, request_id: str) -> list[list[int]]:
        """Return the tokens of each continuation of a request that is done."""
        if request_id not in self.outputs:
            output = self.core.take_output(request_id)
            assert output is not None
            self.outputs[request_id] = output
        return [each.token_ids for each in self.outputs[request_id].outputs]

    def asked_at_layers(self, patch: pytest.MonkeyPatch) -> list[int]:
        """Return a list of how many steps were asked for by the time of each layer that is run."""
        num_asked: list[int] = []
        layer = self.backend.layer

        def noting(*tensors: Any, **options: Any) -> torch.Tensor:
            num_asked.append(len(self.link.steps))
            return layer(*tensors, **options)

        patch.setattr(self.backend, "layer", noting)
        return num_asked

    def check_greedy(self, reference: Reference, *request_ids: str) -> None:
        """Compare these requests' answers, or all, with transformers' of the same length."""
        for request_id in request_ids or self.asked:
            assert self.tokens(request_id) == [reference.greedy(*self.asked[request_id])]

    def check(self) -> None:
        """Check that counts add up, and that nothing is held where no work is left."""
        if self.core.has_work:
            self.planes.check_integrity()
            return
        self.core.settle()
        self.planes.check_integrity()
        for tier in self.planes.pool().usage:
            assert tier.num_held_blocks == 0, tier


def prompt_of(length: int, seed: int) -> list[int]:
    """Return random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


class Reference:
    """Computes tokens by transformers itself."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        (answer,) = self.answers(prompt, num_tokens, min_new_tokens=num_tokens)
        return answer

    @torch.inference_mode()
    def answers(self, prompt: list[int], max_tokens: int, **how: Any) -> list[list[int]]:
        """Return the new tokens of each sequence that ``generate`` returns."""
        ids = torch.tensor([prompt])
        how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, **how}
        answers = self._model.generate(ids, max_new_tokens=max_tokens, **how)
        return answers[:, len(prompt) :].tolist()
