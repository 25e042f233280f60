"""Asks a server for its health, by gRPC's health protocol.

    python -m kvplane.transport.health 127.0.0.1:50051

The exit code is 0 when it serves, 1 when it does not or does not answer, 2 for bad arguments, as a
container's health check expects.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf import wrappers_pb2

from kvplane.errors import InternalError, InvalidRequestError, KvplaneError
from kvplane.transport.connection import Connection
from kvplane.transport.tls import Tls

EXIT_NOT_SERVING: Final = 1
EXIT_BAD_ARGUMENTS: Final = 2
_STATES: Final = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}


async def check(
    target: str, *, service: str = "", tls: Tls | None = None, timeout_s: float = 5.0
) -> str:
    """Return the state of ``service`` (empty: of the whole server) at ``target``: "SERVING" etc.

    A server that cannot be reached is tried until ``timeout_s`` has passed. Raises KvplaneError:
    PlaneUnavailableError or DeadlineExceededError then, and NotFoundError for a service that the
    server does not have.
    """
    connection = Connection(target, tls=tls, timeout_s=timeout_s)
    try:
        # These messages have the same single fields as the protocol's, which would need a package.
        method: Any = connection.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=wrappers_pb2.StringValue.SerializeToString,
            response_deserializer=wrappers_pb2.Int32Value.FromString,
        )
        answer = await connection.call(method, wrappers_pb2.StringValue(value=service))
        if answer.value not in _STATES:
            raise InternalError(f"health state {answer.value} is not known")
        return _STATES[answer.value]
    finally:
        await connection.close()


def main(argv: Sequence[str]) -> int:
    """Run the program. Returns its exit code."""
    options = _parser().parse_args(argv)
    tls = None
    if options.tls_ca or options.tls_cert or options.tls_key:
        tls = Tls(options.tls_ca, options.tls_cert, options.tls_key)
    asking = check(options.address, service=options.service, tls=tls, timeout_s=options.timeout_s)
    try:
        state = asyncio.run(asking)
    except InvalidRequestError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_BAD_ARGUMENTS
    except KvplaneError as error:
        sys.stderr.write(f"{options.address}: {error}\n")
        return EXIT_NOT_SERVING
    sys.stdout.write(f"{state}\n")
    return 0 if state == "SERVING" else EXIT_NOT_SERVING


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m kvplane.transport.health", description=__doc__)
    parser.add_argument("address", help="the server, host:port")
    parser.add_argument("--service", default="", help="full name; empty means the server")
    parser.add_argument("--timeout-s", default=5.0, type=float, help="deadline, in s")
    parser.add_argument("--tls-ca", type=Path, help="authority of the server's certificate")
    parser.add_argument("--tls-cert", type=Path, help="this client's own certificate")
    parser.add_argument("--tls-key", type=Path, help="the key of that certificate")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
