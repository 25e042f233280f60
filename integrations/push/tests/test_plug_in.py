"""How a data plane hosts the plug-in, and what it says of settings that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from two_pools import HERE, PUSHING, data_plane, push_of, settings_of, variables

from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.integrations.push.client import PushClient
from kvplane.integrations.push.metrics import DECLARATIONS
from kvplane.integrations.push.plug_in import PushPlugIn, PushSettings
from kvplane.transport.tls import open_channel
from kvplane.wire.v1.types_pb2 import SignedPayload
from tests.helpers import planes_in_process
from tests.helpers.planes_in_process import control_plane, write_layout
from tests.helpers.scrapes import checked


async def test_it_is_served_beside_the_data_planes_own_calls(tmp_path: Path) -> None:
    async with control_plane() as control:
        settings = settings_of(HERE, control.address, write_layout(tmp_path), metrics_port=0)
        async with data_plane(**settings) as plane, open_channel(plane.address, None) as channel:
            await plane.registered.wait()
            asked = health_pb2.HealthCheckRequest(service=PushPlugIn.service.full_name)
            answer = await health_pb2_grpc.HealthStub(channel).Check(asked)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            async with PushClient(plane.address) as pushes:
                with pytest.raises(KvplaneError):
                    await pushes.receive_blocks(SignedPayload(), SignedPayload(), 1)
            push_of(plane).counts.ended("received", "OK")
            families = await checked(plane.metrics_port)
            assert families.keys() >= {each.name.removesuffix("_total") for each in DECLARATIONS}
            called = {s.labels["method"] for s in families["kvplane_rpc_handled"].samples}
            assert f"/{PushPlugIn.service.full_name}/ReceiveBlocks" in called


async def test_a_data_plane_without_it_says_so(tmp_path: Path) -> None:
    async with control_plane() as control:
        settings = planes_in_process.settings_of(HERE, control.address, write_layout(tmp_path))
        async with (
            planes_in_process.data_plane(**settings) as plane,
            PushClient(plane.address) as pushes,
        ):
            with pytest.raises(KvplaneError, match="PushService is a plug-in's"):
                await pushes.receive_blocks(SignedPayload(), SignedPayload(), 1)


async def test_a_plug_in_that_is_not_installed_is_named(tmp_path: Path) -> None:
    settings = planes_in_process.settings_of(
        HERE, "127.0.0.1:1", write_layout(tmp_path), plug_ins="push,other"
    )
    with pytest.raises(InvalidRequestError, match="no plug-in 'other'"):
        async with planes_in_process.data_plane(**settings):
            pass


async def test_it_takes_no_pushes_in_the_clear_from_other_machines(tmp_path: Path) -> None:
    settings = settings_of(HERE, "127.0.0.1:1", write_layout(tmp_path))
    pushing = {**PUSHING, "bind": "0.0.0.0:0", "advertise": "gpu-1:50"}
    with pytest.raises(InvalidRequestError, match="--tls-cert"):
        async with data_plane(pushing, **settings):
            pass


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"bind": "here"}, "host:port"),
        ({"bind": "0.0.0.0:1"}, "advertise: must be given"),
        ({"advertise": "here"}, "host:port"),
        ({"max_pushes": "0"}, "max-pushes"),
        ({"nothing": "1"}, "KVPLANE_PUSH_NOTHING"),
    ],
)
def test_a_setting_that_is_wrong_is_named(
    wrong: dict[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        PushSettings.read(variables(**wrong))
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
