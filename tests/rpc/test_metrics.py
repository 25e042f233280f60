"""The scrapes of both planes at work: valid, complete, and as docs/reference/metrics.md says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import Metric

from control_plane.server.metrics import DECLARATIONS as OF_CONTROL
from data_plane.server.metrics import DECLARATIONS as OF_DATA
from kvplane import ControlClient
from kvplane.errors import PoolNotFoundError
from kvplane.serving.observability.metrics import SHARED, Declaration
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import execution_pb2_grpc
from tests.helpers.both_planes import POOL, Planes
from tests.helpers.load import Load
from tests.helpers.scrapes import checked

# Samples that come only with what this traffic does not do.
WITHOUT_SAMPLES = {
    "kvplane_certificate_ends_timestamp_seconds",  # with TLS
    "kvplane_device_memory_bytes",
    "kvplane_file_tier_misses_total",
    "kvplane_file_tier_write_errors_total",
    "kvplane_tenant_blocks",  # of open sessions
    "kvplane_tenant_sessions",
}

Families = dict[str, Metric]


@pytest.fixture
async def scraped(tmp_path: Path) -> AsyncIterator[tuple[Families, Families]]:
    """What both planes tell after some traffic, refusals among it."""
    files = {"file_tier_dir": tmp_path / "files", "file_tier_bytes": 2**20}
    data = {"metrics_port": 0, "num_device_blocks": 64, "num_host_blocks": 4, **files}
    async with Planes(tmp_path, metrics_port=0, data=data) as planes:
        async with ControlClient(planes.address) as client:
            load = Load(duration_s=3, num_sequences=16, prefix_tokens=32, own_tokens=8)
            with pytest.raises(PoolNotFoundError):
                await client.get_pool("other")
            await load.run(client, POOL)
            assert load.num_cached_tokens
        await refusals(planes.data.address)
        yield (
            await checked(planes.control.metrics_port),
            await checked(planes.data.metrics_port),
        )


async def refusals(address: str) -> None:
    """Refused by the service, by the executor in a unary call, and in a stream."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = execution_pb2_grpc.ExecutionServiceStub(channel)
        for call, request in (
            (stub.ReshapeAndCache, pb.RunLayerRequest()),
            (stub.CopyBlocks, pb.StartPlanRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await call(request)
        stream = stub.Execute()
        await stream.write(pb.ExecuteRequest())
        assert (await stream.read()).error.reason == "INVALID_REQUEST"
        stream.cancel()


def values(family: Metric, *labels: str) -> dict[tuple[str, ...], float]:
    return {tuple(s.labels[label] for label in labels): s.value for s in family.samples}


def names_of(families: Families) -> set[str]:
    return {n + "_total" * (f.type == "counter") for n, f in families.items()}


async def test_scrapes_are_valid_and_agree(scraped: tuple[Families, Families]) -> None:
    check_what_is_declared_is_told_and_nothing_else(scraped)
    check_every_refusal_is_counted_once(scraped[1])
    check_counts_agree_between_the_planes(*scraped)


def check_what_is_declared_is_told_and_nothing_else(scraped: tuple[Families, Families]) -> None:
    for families, own in zip(scraped, (OF_CONTROL, OF_DATA), strict=True):
        told = {name for name in names_of(families) if not name.startswith("process_")}
        declared = {declaration.name for declaration in (*SHARED, *own)}
        assert told - declared == set(), "not declared"
        missing = declared - told - WITHOUT_SAMPLES
        assert missing == set(), "declared and not told"
        assert {"process_resident_memory_bytes", "process_cpu_seconds_total"} < names_of(families)
        assert not any(name.endswith("_created") for name in told)
        for declaration in (*SHARED, *own):
            check_labels(families, declaration, {"pool"} if own is OF_DATA else set())


def check_labels(families: Families, declaration: Declaration, constant: set[str]) -> None:
    name = declaration.name
    family = families.get(name) or families.get(name.removesuffix("_total"))
    for sample in family.samples if family is not None else ():
        labels = set(sample.labels) - {"le"}
        assert labels == {*declaration.labels, *constant}, name
        if "info" not in name:
            assert abs(sample.value) < 2**53, f"{name} does not fit in a float"


def check_every_refusal_is_counted_once(data: Families) -> None:
    refused = values(data["kvplane_rejections"], "reason")
    assert refused[("INVALID_REQUEST",)] == 2, "one unary, one in a stream"
    assert refused[("BAD_SIGNATURE",)] == 1
    assert values(data["kvplane_command_rejections"], "reason") == {("BAD_SIGNATURE",): 1}


def check_counts_agree_between_the_planes(control: Families, data: Families) -> None:
    plans = values(control["kvplane_plans"])[()]
    assert values(data["kvplane_plans_run"])[()] in (plans, plans - 1), "the last only frees"
    moved = values(data["kvplane_transferred_blocks"], "direction")
    swapped = values(control["kvplane_swapped_blocks"], "direction")
    demoted = values(control["kvplane_demoted_blocks"])[()]
    assert swapped["out",] <= moved["swap_out",] <= swapped["out",] + demoted
    blocks = values(control["kvplane_blocks"], "tier", "state")
    assert sum(v for (tier, _), v in blocks.items() if tier == "device") == 64
    evictions = sum(values(control["kvplane_evictions"], "tier", "reason").values())
    lifetimes = control["kvplane_block_lifetime_seconds"].samples
    assert evictions == sum(s.value for s in lifetimes if s.name.endswith("_count")) > 0
