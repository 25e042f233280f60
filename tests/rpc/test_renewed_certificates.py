"""Certificates that are replaced on disk are used by the next connection, over real sockets; what
is open goes on, and files that are wrong change nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from control_plane.server.server import ControlPlaneServer
from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, Tls
from kvplane.errors import InvalidRequestError, UnauthenticatedError
from kvplane.integrations.router.config import RouterSettings
from kvplane.integrations.router.program import engine_client
from kvplane.serving.certificates import ServerCertificate, ServerTls
from kvplane.serving.config import HttpServerSettings
from kvplane.serving.http_server import HttpServer
from kvplane.serving.observability.metrics import PlaneMetrics
from kvplane.transport.tls import credentials_of
from tests.helpers.data.data_server import config_of
from tests.helpers.planes_in_process import control_plane
from tests.helpers.programs import printed
from tests.helpers.refusals import refused
from tests.helpers.sdk_peers import WhoAmI, serving
from tests.helpers.waiting import until

NAME = "localhost"
ENGINE = f"https://{NAME}:1=pool"


class Authority:
    """Signs certificates in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.ca = folder / "ca.pem"
        self._run("req", "-x509", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")

    def sign(self, name: str) -> tuple[bytes, bytes]:
        """A certificate that names ``name`` and localhost, and its key."""
        self._run("req", "-subj", f"/CN={name}", "-keyout", "one.key", "-out", "one.csr")
        (self.folder / "one.ext").write_text(f"subjectAltName=DNS:{NAME}\n")
        signed = "x509 -req -in one.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 9"
        signed += " -extfile one.ext -out one.pem"
        printed("openssl", *signed.split(), cwd=self.folder)
        return (self.folder / "one.pem").read_bytes(), (self.folder / "one.key").read_bytes()

    def _run(self, command: str, *arguments: str) -> None:
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        printed("openssl", command, *key, *arguments, cwd=self.folder)


class Files:
    """A certificate and its key."""

    def __init__(self, folder: Path, name: str) -> None:
        self.certificate, self.key = folder / f"{name}.pem", folder / f"{name}.key"

    def put(self, pair: tuple[bytes, bytes]) -> None:
        for path, content in zip((self.certificate, self.key), pair, strict=True):
            partial = path.with_suffix(".partial")
            partial.write_bytes(content)
            partial.replace(path)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki") / "ca")


@pytest.fixture(scope="module")
def pairs(authority: Authority) -> list[tuple[bytes, bytes]]:
    return [authority.sign(name) for name in ("first", "second")]


@pytest.fixture
def files(tmp_path: Path, pairs: list[tuple[bytes, bytes]]) -> Files:
    files = Files(tmp_path, "server")
    files.put(pairs[0])
    return files


@pytest.fixture
async def server(files: Files) -> AsyncIterator[ControlPlaneServer]:
    async with control_plane(
        plane_bind="127.0.0.1:0",
        metrics_port=0,
        metrics_tls=True,
        page_port=0,
        tls_cert=files.certificate,
        tls_key=files.key,
    ) as server:
        yield server


async def shown(authority: Authority, address: str) -> str:
    """The common name of the certificate that a new connection is shown."""

    def look() -> str:
        context = ssl.create_default_context(cafile=authority.ca)
        context.set_alpn_protocols(["h2", "http/1.1"])
        host, _, port = address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), 10) as plain,
            context.wrap_socket(plain, server_hostname=NAME) as secure,
        ):
            [[(_, name)]] = secure.getpeercert()["subject"]  # type: ignore[index]
            return str(name)

    return await asyncio.to_thread(look)


def tls_of(authority: Authority, **more: Any) -> Tls:
    return Tls(ca_file=authority.ca, server_name=NAME, **more)


async def test_the_next_connection_has_the_new_certificate_and_streams_go_on(
    authority: Authority,
    pairs: list[tuple[bytes, bytes]],
    files: Files,
    server: ControlPlaneServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ports = [server.address, f"127.0.0.1:{server.metrics_port}", server.page_address]
    async with ControlClient(server.address, tls=tls_of(authority)) as client:
        stub = client._stub
        stream = stub.StreamSteps(timeout=30)
        await stream.wait_for_connection()
        assert [await shown(authority, port) for port in ports] == ["first"] * 3
        files.put(pairs[1])
        assert [await shown(authority, port) for port in ports] == ["second"] * 3

        files.put((pairs[0][0], pairs[1][1]))  # a certificate, and the key of another one
        assert [await shown(authority, port) for port in ports] == ["second"] * 3
        for content in (b"", b"no certificate"):
            files.certificate.write_bytes(content)
            assert [await shown(authority, port) for port in ports] == ["second"] * 3
        files.key.unlink()
        assert [await shown(authority, port) for port in ports] == ["second"] * 3
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert all(record.getMessage().startswith("not renewed files=") for record in errors)
        assert len(errors) >= 4 * len(ports)

        files.put(pairs[0])
        assert [await shown(authority, port) for port in ports] == ["first"] * 3
        assert (await client.get_server_info()).incarnation
        assert not stream.done()
        stream.cancel()
    name = "kvplane_certificate_ends_timestamp_seconds"
    counted = await asyncio.to_thread(server.metrics.registry.get_sample_value, name)
    assert counted == ends_s(files.certificate)


def ends_s(file: Path) -> int:
    """When a certificate expires, as openssl reads it."""
    command = ["openssl", "x509", "-noout", "-enddate", "-in", str(file)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return ssl.cert_time_to_seconds(said.strip().removeprefix("notAfter="))


@pytest.mark.parametrize("days", [1, 30_000], ids=["UTCTime", "GeneralizedTime"])
def test_the_end_of_the_certificate_in_use_is_counted(
    files: Files, pairs: list[tuple[bytes, bytes]], tmp_path: Path, days: int
) -> None:
    """The files' own end would hide that they cannot be used, and be no alarm."""
    other = Files(tmp_path, "other")
    key = f"-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {other.key}"
    made = f"req -x509 -subj /CN=x -days {days} {key} -out {other.certificate}"
    subprocess.run(["openssl", *made.split()], check=True, capture_output=True)
    metrics = PlaneMetrics("control", ())
    metrics.certificate_ends_s = ServerCertificate(ServerTls(files.certificate, files.key)).ends_s

    def counted() -> float | None:
        return metrics.registry.get_sample_value("kvplane_certificate_ends_timestamp_seconds")

    first = ends_s(files.certificate)
    assert counted() == first
    new = other.certificate.read_bytes()
    files.put((new, pairs[0][1]))
    assert counted() == first
    files.put((new, other.key.read_bytes()))
    assert counted() == ends_s(other.certificate) != first


@asynccontextmanager
async def http_server(files: Files, port_file: Path) -> AsyncIterator[str]:
    """As the router and the engine serve; its address."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    settings = HttpServerSettings(
        bind="127.0.0.1:0",
        https_cert=files.certificate,
        https_key=files.key,
        port_file=port_file,
    )
    server = HttpServer(app, settings, logging.getLogger(__name__), CollectorRegistry())
    running = asyncio.create_task(server.serve())
    await until(lambda: port_file.exists())
    try:
        yield f"127.0.0.1:{port_file.read_text().strip()}"
    finally:
        server.should_exit = True
        await running


async def test_an_http_server_too(
    authority: Authority, pairs: list[tuple[bytes, bytes]], files: Files, tmp_path: Path
) -> None:
    async with http_server(files, tmp_path / "port") as address:
        for pair, name in zip(pairs, ("first", "second"), strict=True):
            files.put(pair)
            assert await shown(authority, address) == name


async def test_a_router_trusts_engines_of_its_authority_alone(
    authority: Authority, files: Files, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    async with http_server(files, tmp_path / "port") as address:
        url = f"https://{NAME}:{address.rpartition(':')[2]}/"
        async with engine_client(RouterSettings(engine=ENGINE, engine_ca=authority.ca)) as client:
            await client.get(url)
        async with engine_client(RouterSettings(engine=ENGINE, engine_ca=other.ca)) as client:
            with pytest.raises(httpx2.ConnectError):
                await client.get(url)
    with pytest.raises(InvalidRequestError):
        engine_client(RouterSettings(engine=ENGINE, engine_ca=tmp_path / "none.pem"))


@pytest.mark.parametrize("content", ["", "no certificate", "a key"])
def test_authorities_without_a_certificate_are_refused_by_their_file(
    authority: Authority, files: Files, tmp_path: Path, content: str
) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text(files.key.read_text() if content == "a key" else content)
    with pytest.raises(OSError, match=r"empty\.pem has no certificate"):
        ServerCertificate(ServerTls(files.certificate, files.key, empty))
    with refused(InvalidRequestError, "tls.ca_file", r"empty\.pem has no certificate"):
        credentials_of(Tls(ca_file=empty))
    with refused(InvalidRequestError, "engine_ca", r"empty\.pem"):
        engine_client(RouterSettings(engine=ENGINE, engine_ca=empty))


def served_to_known(authority: Authority, files: Files) -> ServerTls:
    """Settings of a server that serves who shows a certificate."""
    return ServerTls(files.certificate, files.key, authority.ca)


async def test_a_client_shows_its_new_certificate_when_it_is_opened_again(
    authority: Authority, pairs: list[tuple[bytes, bytes]], files: Files, tmp_path: Path
) -> None:
    own = Files(tmp_path, "client")
    tls = tls_of(authority, cert_file=own.certificate, key_file=own.key)
    async with serving(WhoAmI(), served_to_known(authority, files)) as address:
        own.put(pairs[0])
        async with ControlClient(address, tls=tls) as former:
            own.put(pairs[1])
            async with ControlClient(address, tls=tls) as later:
                assert await later.list_pools() == ["second"]
            assert await former.list_pools() == ["first"]
        own.certificate.write_bytes(pairs[0][0])  # its key is another's
        with pytest.raises(InvalidRequestError, match="cert_file"):
            ControlClient(address, tls=tls)


async def test_a_data_plane_shows_its_new_certificate_when_it_registers_again(
    authority: Authority,
    pairs: list[tuple[bytes, bytes]],
    files: Files,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = Files(tmp_path, "plane")
    own.put(pairs[0])
    plane = WhoAmI()
    async with serving(plane, served_to_known(authority, files)) as address:
        data = await DataPlaneServer.start(
            config_of(
                tmp_path,
                address,
                tls=True,
                tls_ca=authority.ca,
                tls_name=NAME,
                tls_cert=own.certificate,
                tls_key=own.key,
            )
        )

        async def until_registered(name: str) -> None:
            plane.registered.clear()
            await until(lambda: name in plane.registered)

        await until_registered("first")
        own.put(pairs[1])
        await until_registered("second")
        own.certificate.unlink()
        await until(lambda: "not renewed control_plane=" in caplog.text)
        await until_registered("second")
        await data.stop()


@pytest.mark.parametrize(
    ("subject", "is_one"),
    [("engine", True), ("engine/CN=operator", False), ("engine, CN=operator", True)],
)
async def test_a_client_certificate_has_one_common_name(
    authority: Authority, files: Files, tmp_path: Path, subject: str, is_one: bool
) -> None:
    own = Files(tmp_path, "client")
    own.put(authority.sign(subject))
    served = {"tls_cert": files.certificate, "tls_key": files.key}
    async with control_plane(**served, tls_client_ca=authority.ca, page_port=0) as plane:
        context = ssl.create_default_context(cafile=authority.ca)
        context.load_cert_chain(own.certificate, own.key)
        async with httpx2.AsyncClient(verify=context) as browser:
            page = await browser.get(f"https://{NAME}:{plane.page_address.rpartition(':')[2]}/")
        assert page.status_code == (200 if is_one else 401)
        tls = tls_of(authority, cert_file=own.certificate, key_file=own.key)
        async with ControlClient(plane.address, tls=tls) as client:
            if is_one:
                await client.get_server_info()
            else:
                with pytest.raises(UnauthenticatedError, match="several common names"):
                    await client.get_server_info()


@pytest.mark.parametrize(
    ("key", "is_usable"), [("ed25519", False), ("P-521", False), ("P-384", True), ("rsa", True)]
)
def test_a_key_that_no_client_can_use_is_refused_by_its_file(
    tmp_path: Path, key: str, is_usable: bool
) -> None:
    curve = f"ec -pkeyopt ec_paramgen_curve:{key}" if key.startswith("P-") else key
    files = tmp_path / "server.pem", tmp_path / "server.key"
    made = f"req -x509 -subj /CN=x -nodes -newkey {curve} -out {files[0]} -keyout {files[1]}"
    subprocess.run(["openssl", *made.split()], check=True, capture_output=True)
    if is_usable:
        ServerCertificate(ServerTls(*files)).credentials()
    else:
        with pytest.raises(OSError, match=rf"server\.pem .*{key}"):
            ServerCertificate(ServerTls(*files))
