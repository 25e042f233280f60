"""The connector and the tier below stand-ins of vLLM, over planes: right bytes or a miss."""

from __future__ import annotations

import hashlib
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import standins
from signatures import signatures
from standins import LookupResult, OffloadPolicy, ReqContext, ScheduleEndContext, TransferJob

from kvplane.errors import LayoutMismatchError
from tests.e2e.engine_planes import opaque_pair

standins.install()

from kvplane.integrations import vllm as plug_in  # noqa: E402
from kvplane.integrations.vllm.connector import KvplaneConnector  # noqa: E402
from kvplane.integrations.vllm.identity import model_id_of, weights_of  # noqa: E402
from kvplane.integrations.vllm.tier import KvplaneTier  # noqa: E402

CHUNK, PAGE_BYTES, NUM_ROWS = 16, 256, 8
PATIENCE_S = 20.0
PATIENT = {"lookup_s": PATIENCE_S, "transfer_s": PATIENCE_S}
TOKENS = list(range(3 * CHUNK + 5))
SIGNATURES = Path(__file__).with_name("signatures.txt").read_text().splitlines()
PARALLEL = SimpleNamespace(tp_size=2, pp_size=1, pcp_size=1, dcp_size=1)
CONFIG = SimpleNamespace(
    groups=(SimpleNamespace(tokens_per_block=CHUNK, layer_names=("a", "b")),),
    model=SimpleNamespace(name="tiny", dtype="float16"),
    cache=SimpleNamespace(blocks_per_chunk=1),
    parallel=PARALLEL,
    kv_cache_layout="LBHNC",
    canonical_layout=False,
    replicated_layout=False,
)
MODEL = SimpleNamespace(revision="r1", quantization=None, dtype="torch.float16", hf_overrides={})


class Engine:
    """A connector, or a tier alone, with main memory of eight chunks."""

    def __init__(self, *, has_connector: bool = True, has_events: bool = False, **given: Any):
        self.memory = bytearray(NUM_ROWS * PAGE_BYTES)
        view = memoryview(self.memory).cast("b", (NUM_ROWS, PAGE_BYTES))
        spec = SimpleNamespace(
            tokens_per_block=(CHUNK,),
            blocks_per_chunk=1,
            config=CONFIG,
            kv_events_config=SimpleNamespace(enable_kv_cache_events=has_events),
        )
        base = KvplaneConnector if has_connector else standins.OffloadingConnector
        self.connector = base(
            SimpleNamespace(
                model_config=MODEL, tier=lambda: KvplaneTier(spec, view, "kvplane", **given)
            ),
            None,
            None,
        )
        self.tier: KvplaneTier = self.connector.tier
        self.num_jobs = 0

    def ask(self, name: str, tokens: Sequence[int] = TOKENS, **given: Any) -> ReqContext:
        """A request that vLLM has heard of, with the keys of its chunks."""
        self.connector.on_new_request(standins.request_of(name, [*tokens], **given))
        context = self.connector.contexts[name]
        salt = str(sorted(given.items(), key=str)).encode()
        for end in range(CHUNK, len(tokens) + 1, CHUNK):
            key = hashlib.sha256(salt + repr([*tokens[:end]]).encode()).digest() + bytes(4)
            context.positions[key] = end
        return context

    def look_up(self, context: ReqContext, keys: Sequence[bytes] | None = None) -> list[bool]:
        """Return what each chunk is once none is RETRY."""
        wanted = [*context.positions] if keys is None else keys
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            found = [self.tier.lookup(key, context) for key in wanted]
            if LookupResult.RETRY not in found:
                return [each is LookupResult.HIT for each in found]
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(0.01)
        raise TimeoutError

    def run(self, context: ReqContext, keys: Sequence[bytes], *, load: bool) -> Any:
        """Load chunks into the first rows of memory, or store them from there."""
        self.num_jobs += 1
        job = TransferJob(self.num_jobs, keys, range(len(keys)), load, context)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        deadline_s = time.monotonic() + PATIENCE_S
        while not (done := self.tier.get_finished_jobs()) and time.monotonic() < deadline_s:
            assert self.tier.has_pending_work()
            time.sleep(0.01)
        (result,) = done
        assert result.job_id == job.job_id
        return result

    def store(self, name: str, **given: Any) -> ReqContext:
        """Store a request's chunks, bytes that say which chunk it is, and look them up: others see
        a store from its session's next step on.
        """
        context = self.ask(name, **given)
        for row in range(NUM_ROWS):
            self.memory[row * PAGE_BYTES : (row + 1) * PAGE_BYTES] = bytes([row + 1]) * PAGE_BYTES
        assert self.run(context, [*context.positions], load=False).success
        self.tier.on_request_finished(context)
        assert all(self.look_up(self.ask(f"{name} again", **given), [*context.positions]))
        return context


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """Makes engines on one pool."""
    model_id = model_id_of(CONFIG, weights_of(SimpleNamespace(model_config=MODEL)), PAGE_BYTES)
    yield from engines_of(tmp_path_factory.mktemp("planes"), model_id)


def engines_of(folder: Path, model_id: str) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []
    with opaque_pair(folder, PAGE_BYTES, model_id, num_device_blocks=64) as planes:

        def engine(**given: Any) -> Engine:
            options = {"control_plane": planes.control.address, **PATIENT, **given}
            engines.append(Engine(**options))
            return engines[-1]

        yield engine
        for each in engines:
            each.tier.shutdown()


def test_the_stand_ins_have_the_signatures_of_the_release() -> None:
    wanted = [line.split(": ", 1) for line in SIGNATURES]
    assert signatures() == [line for numbers, line in wanted if "0.33" in numbers.split()]


def test_other_releases_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        plug_in.register()
    assert {*standins.KVConnectorFactory.found} == {"KvplaneConnector", "kvplane"}
    monkeypatch.setattr(plug_in.vllm, "__version__", "0.34.1")
    monkeypatch.delitem(sys.modules, KvplaneConnector.__module__)
    with pytest.raises(ImportError, match=r"vLLM 0\.32 and 0\.33, and this is 0\.34\.1"):
        importlib.import_module(KvplaneConnector.__module__)


def test_another_engine_loads_the_common_beginning(pool: Callable[..., Engine]) -> None:
    stored = pool(namespace="begin").store("a")
    other = pool(namespace="begin")
    tokens = [*TOKENS[: 2 * CHUNK], *range(500, 500 + 2 * CHUNK)]
    context = other.ask("b", tokens)
    keys = [*context.positions]
    assert keys[:2] == [*stored.positions][:2]
    assert other.tier.lookup(keys[0], context) is LookupResult.RETRY
    assert other.look_up(context) == [True, True, False, False]
    result = other.run(context, keys[1::-1], load=True)
    assert (result.success, result.transfer_bytes) == (True, 2 * PAGE_BYTES)
    assert other.memory[: 2 * PAGE_BYTES] == b"\2" * PAGE_BYTES + b"\1" * PAGE_BYTES
    assert other.tier._cache.counters["hits"] == 1, "one look-up for a request"
    other.tier.on_schedule_end(ScheduleEndContext(["b"], ()))
    assert other.look_up(context) == [False] * 4, "it has begun"


def test_a_tier_alone_finds_by_vllms_keys(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weight_version: is needed"):
        Engine(has_connector=False)
    make = engines_of(tmp_path, model_id_of(CONFIG, None, PAGE_BYTES))
    engine = next(make)
    given = {"has_connector": False, "weight_version": "1"}
    stored = [*engine(**given).store("a").positions]
    other = engine(**given)
    context = other.ask("b")
    assert other.look_up(context, [b"short", *stored, bytes(36)]) == [False, *[True] * 3, False]
    assert other.run(context, [stored[2], stored[0]], load=True).success
    assert other.memory[: 2 * PAGE_BYTES] == b"\3" * PAGE_BYTES + b"\1" * PAGE_BYTES
    third = engine(**given | {"weight_version": "2"})
    assert third.look_up(third.ask("c"), stored) == [False] * 3
    assert [*make] == []


def image(identifier: str, offset: int = 20, length: int = 4) -> Any:
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=place)


def adapter(name: str, path: str = "/x", *, load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=path, load_inplace=load_inplace)


@pytest.mark.parametrize(
    ("given", "num_shared"),
    [
        ({}, 0),
        ({"cache_salt": "b"}, 0),
        ({"cache_salt": "a", "lora_request": adapter("l")}, 0),
        ({"cache_salt": "a", "mm_features": [image("cat")]}, 1),
        ({"cache_salt": "a"}, 3),
    ],
)
def test_kv_of_another_identity_is_a_miss(pool, given: dict[str, Any], num_shared: int) -> None:
    pool(namespace="identity").store("a", cache_salt="a")
    other = pool(namespace="identity")
    found = other.look_up(other.ask("b", **given))
    assert found == [True] * num_shared + [False] * (3 - num_shared)


def test_images_and_adapters_differ_by_all_that_says_which(pool: Callable[..., Engine]) -> None:
    given = {"lora_request": adapter("l"), "mm_features": [image("cat")]}
    pool(namespace="which").store("a", **given)
    other = pool(namespace="which")
    for i, (change, num_hits) in enumerate(
        [
            ({}, 3),
            ({"mm_features": [image("dog")]}, 1),
            ({"mm_features": [image("cat", 21)]}, 1),
            ({"lora_request": adapter("l", "/y")}, 0),
        ]
    ):
        assert sum(other.look_up(other.ask(f"b{i}", **given | change))) == num_hits
    version = pool(namespace="which", weight_version="2")
    assert version.look_up(version.ask("c", **given)) == [False] * 3


@pytest.mark.parametrize(
    "given",
    [
        {"prompt_embeds": object()},
        {"resumable": True},
        {"lora_request": adapter("l", load_inplace=True)},
        {"mm_features": [image("sound", len(TOKENS) - 2, 4)]},
    ],
)
def test_what_cannot_be_told_exactly_is_not_cached(pool, given: dict[str, Any]) -> None:
    engine = pool(namespace="inexact")
    context = engine.ask("a", **given)
    assert not engine.run(context, [*context.positions], load=False).success
    assert engine.look_up(context) == [False] * 3


def test_a_chunk_of_another_key_is_a_miss_for_the_rest_of_its_request(pool) -> None:
    engine = pool(namespace="keys", has_events=True)
    keys = [*engine.store("a").positions]
    context = engine.ask("b")
    context.positions = {keys[0]: CHUNK, bytes(36): 2 * CHUNK, keys[2]: 3 * CHUNK}
    assert engine.look_up(context) == [True] * 3
    result = engine.run(context, [*context.positions], load=True)
    assert (result.success, result.successful_keys) == (False, [keys[0], keys[2]])
    assert engine.look_up(context) == [True, False, True]
    gone = engine.ask("c", range(100, 150))
    gone.positions = {keys[0]: CHUNK}
    assert engine.look_up(gone) == [False]
    told = [(event.keys, event.removed, event.medium.value) for event in engine.tier.take_events()]
    assert told == [(keys, False, "STORAGE"), ([keys[0]], True, "STORAGE")]
    assert engine.tier.take_events() == []


def test_after_a_reset_nothing_of_before_is_found(pool: Callable[..., Engine]) -> None:
    engine = pool(namespace="reset")
    engine.store("a")
    context = engine.ask("b")
    assert engine.look_up(context) == [True] * 3
    engine.tier.drain_jobs()
    assert engine.look_up(context) == [False] * 3
    assert engine.look_up(engine.ask("c")) == [False] * 3
    engine.store("d")
    assert engine.look_up(engine.ask("e")) == [True] * 3


def test_whole_requests_are_asked_for_after_a_beginning_was_gone(pool) -> None:
    engine = pool(namespace="heal")
    context = engine.ask("a")
    assert not engine.run(context, [*context.positions][1:], load=False).success
    engine.ask("b")
    assert engine.connector.policies == [OffloadPolicy.CHUNK_LEVEL, OffloadPolicy.REQUEST_LEVEL]


def test_a_pool_of_another_layout_is_refused_by_name_of_what_differs(pool, monkeypatch) -> None:
    monkeypatch.setattr(PARALLEL, "tp_size", 4)
    with pytest.raises(LayoutMismatchError, match="model_id"):
        pool()
    with pytest.raises(ValueError, match="colour: is no setting"):
        pool(colour="red")


def test_without_a_pool_all_is_a_miss_at_once() -> None:
    engine = Engine(control_plane="127.0.0.1:1", connect_s=0.3)
    context = engine.ask("a")
    began_s = time.monotonic()
    assert engine.look_up(context) == [False] * 3
    assert not engine.run(context, [*context.positions], load=False).success
    assert time.monotonic() - began_s < 2
    assert engine.tier.config_info() == {"kvplane_pool": "default", "kvplane_prefixes": "tokens"}
    engine.tier.shutdown()
