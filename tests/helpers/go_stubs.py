"""Go stubs of the contract, by the protoc-gen-go that Debian has the source of.

That release is older than optional fields of proto3, and protoc refuses to call it for a file that
has one. It is given the request that protoc would give it; the field becomes a oneof, which is the
same on the wire.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from google.protobuf import descriptor_pb2, duration_pb2
from google.protobuf.compiler import plugin_pb2

from kvplane.v1 import execution_pb2, local_pb2, pool_pb2, session_pb2, types_pb2
from tests.helpers.tools import needs

DEBIAN = Path("/usr/share/gocode")
_KNOWN = "github.com/golang/protobuf"
_PARAMETERS = (
    "plugins=grpc",
    f"Mgoogle/protobuf/duration.proto={_KNOWN}/ptypes/duration",
    f"Mgoogle/protobuf/descriptor.proto={_KNOWN}/protoc-gen-go/descriptor",
)


def go(*arguments: str, path: Path, cache: Path) -> None:
    """Run the go command on Debian's packages and those under ``path``."""
    needs("go")
    environment = os.environ | {
        "GO111MODULE": "off",
        "GOPATH": f"{path}:{DEBIAN}",
        "GOCACHE": str(cache),
        "GOFLAGS": "-p=2",
    }
    done = subprocess.run(["go", *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def write_stubs(path: Path, cache: Path) -> None:
    """Write the package kvplane/v1 to the Go path ``path``."""
    plugin = path / "protoc-gen-go"
    go("build", "-o", str(plugin), f"{_KNOWN}/protoc-gen-go", path=path, cache=cache)
    request = plugin_pb2.CodeGeneratorRequest(parameter=",".join(_PARAMETERS))
    # Each after those that it imports.
    contract = (types_pb2, local_pb2, session_pb2, pool_pb2, execution_pb2)
    for module in (descriptor_pb2, duration_pb2, *contract):
        module.DESCRIPTOR.CopyToProto(request.proto_file.add())
    for module in contract:
        request.file_to_generate.append(module.DESCRIPTOR.name)
    done = subprocess.run([plugin], input=request.SerializeToString(), capture_output=True)
    response = plugin_pb2.CodeGeneratorResponse.FromString(done.stdout)
    assert not response.error, response.error
    for file in response.file:
        target = path / "src" / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.content)
