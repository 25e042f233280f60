"""Asks a server for its health, by gRPC's health protocol. Needs the extra ``serving``.

    python -m kvplane.health 127.0.0.1:50051

The exit code is 0 when it serves, 1 when it does not or does not answer, 2 for bad arguments, as a
container's health check expects.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any, Final

import click
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvplane.connection import Connection
from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.tls import TlsOptions

EXIT_NOT_SERVING: Final = 1
EXIT_BAD_ARGUMENTS: Final = 2


async def check(
    target: str, *, service: str = "", tls: TlsOptions | None = None, timeout_s: float = 5.0
) -> str:
    """The state of ``service`` (empty: of the whole server) at ``target``, such as "SERVING".

    A server that cannot be reached is tried until ``timeout_s`` has passed. Raises KvplaneError:
    PlaneUnavailableError or DeadlineExceededError then, and NotFoundError for a service that the
    server does not have.
    """
    connection = Connection(target, tls=tls, timeout_s=timeout_s)
    try:
        stub: Any = health_pb2_grpc.HealthStub(connection.channel)  # untyped in its stubs
        request = health_pb2.HealthCheckRequest(service=service)
        answer: health_pb2.HealthCheckResponse = await connection.call(stub.Check, request)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    finally:
        await connection.close()


@click.command(context_settings={"show_default": True})
@click.argument("address")
@click.option("--service", default="", help="Full name of a service; empty means the server.")
@click.option("--timeout-s", default=5.0, type=click.FloatRange(min=0.1), help="Deadline, in s.")
@click.option("--tls-ca", type=Path, help="Authority that signs the server's certificate.")
@click.option("--tls-cert", type=Path, help="This client's own certificate.")
@click.option("--tls-key", type=Path, help="The key of that certificate.")
def main(
    address: str,
    service: str,
    timeout_s: float,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> None:
    """Ask the server at ADDRESS, "host:port", for its health. Any --tls option turns TLS on."""
    tls = None
    if tls_ca or tls_cert or tls_key:
        tls = TlsOptions(ca_file=tls_ca, cert_file=tls_cert, key_file=tls_key)
    try:
        state = asyncio.run(check(address, service=service, tls=tls, timeout_s=timeout_s))
    except InvalidRequestError as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_BAD_ARGUMENTS)
    except KvplaneError as error:
        click.echo(f"{address}: {error}", err=True)
        sys.exit(EXIT_NOT_SERVING)
    click.echo(state)
    sys.exit(0 if state == "SERVING" else EXIT_NOT_SERVING)


if __name__ == "__main__":
    main()
