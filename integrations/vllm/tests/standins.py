"""What the plug-in takes from vLLM 0.33, small, with the signatures in signatures.txt."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from signatures import BASE, CONNECTORS, TIERING


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class OffloadPolicy(Enum):
    CHUNK_LEVEL = "chunk_level"
    REQUEST_LEVEL = "request_level"


@dataclass
class RequestOffloadingContext:
    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Medium
    removed: bool
    locality: Any = None
    ownership: str | None = None
    removal_expected: bool = False
    metadata_only: bool = False


class ScheduleEndContext(NamedTuple):
    new_req_ids: Collection[str]
    preempted_req_ids: Collection[str]


@dataclass
class ReqContext:
    req_id: str
    positions: dict[bytes, int] = field(default_factory=dict)

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self.positions.get(key)


@dataclass
class TransferJob:
    job_id: int
    keys: Collection[bytes]
    chunk_ids: Any
    is_promotion: bool
    req_context: ReqContext
    submit_time: float = field(default_factory=time.monotonic)


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Collection[bytes] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    medium: ClassVar[Medium | None] = None

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
    ) -> None:
        assert primary_kv_view.strides is not None
        self._block_size_bytes = primary_kv_view.strides[0]
        self.locality = None

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult: ...
    def submit_store(self, job_metadata: TransferJob) -> None: ...
    def submit_load(self, job_metadata: TransferJob) -> None: ...
    def get_finished_jobs(self) -> Iterable[JobResult]: ...
    def drain_jobs(self) -> None: ...
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext: ...
    def on_request_finished(self, req_context: ReqContext) -> None: ...
    def on_schedule_end(self, context: ScheduleEndContext) -> None: ...
    def take_events(self) -> Iterable[OffloadingEvent]: ...
    def shutdown(self) -> None: ...
    def has_pending_work(self) -> bool: ...
    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]: ...
    def config_info(self) -> dict[str, Any]: ...


class OffloadingConnector:
    """Makes the tier of ``vllm_config.tier`` and tells it of requests, as the manager does."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.tier = vllm_config.tier()
        self.contexts: dict[str, ReqContext] = {}
        self.policies: list[OffloadPolicy] = []

    def on_new_request(self, request: Any) -> None:
        context = self.contexts[request.request_id] = ReqContext(request.request_id)
        self.policies.append(self.tier.on_new_request(context).policy)


class _Registry:
    """Keeps names of classes, each once."""

    found: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls.found:
            raise ValueError(name)
        cls.found[name] = module_path, class_name


class KVConnectorFactory(_Registry):
    register_connector = _Registry.register


class SecondaryTierFactory(_Registry):
    @classmethod
    def register_tier(cls, tier_type: str, module_path: str, class_name: str) -> None:
        cls.register(tier_type, module_path, class_name)


def install() -> None:
    """Put the stand-ins where the plug-in imports vLLM."""
    modules: dict[str, list[Any]] = {
        f"{CONNECTORS}.factory": [KVConnectorFactory],
        f"{CONNECTORS}.v1.offloading_connector": [OffloadingConnector],
        BASE: [LookupResult, Medium, OffloadPolicy, RequestOffloadingContext, OffloadingEvent],
        f"{TIERING}.base": [TransferJob, JobResult, SecondaryTierManager],
        f"{TIERING}.factory": [SecondaryTierFactory],
    }
    modules[BASE] += [ReqContext, ScheduleEndContext]
    sys.modules["vllm"] = ModuleType("vllm")
    sys.modules["vllm"].__dict__["__version__"] = "0.33.0"
    for name, classes in modules.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update({each.__name__: each for each in classes})


def request_of(request_id: str, tokens: list[int], **given: Any) -> SimpleNamespace:
    """A request of vLLM that asks for nothing special."""
    usual = {
        "request_id": request_id,
        "prompt_token_ids": tokens,
        "all_token_ids": tokens,
        "num_prompt_tokens": len(tokens),
        "prompt_embeds": None,
        "mm_features": [],
        "lora_request": None,
        "cache_salt": None,
        "resumable": False,
    }
    return SimpleNamespace(**usual | given)
