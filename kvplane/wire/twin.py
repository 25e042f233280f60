"""The twin of the contract: ``kvplane.wire.v1`` has the messages of ``kvplane.v1`` with the same
bytes, but a column is the bytes of its elements (see ``scripts/protos.sh``).
"""

from __future__ import annotations

from typing import Final

from google.protobuf.descriptor import Descriptor

TYPED: Final = "kvplane.v1."
TWIN: Final = "kvplane.wire.v1."


def twin_of(described: Descriptor) -> Descriptor:
    """Return the twin of a message of the contract. A message of another package has none, and is
    returned as it is.
    """
    if not described.full_name.startswith(TYPED):
        return described
    name = TWIN + described.full_name.removeprefix(TYPED)
    twin: Descriptor = described.file.pool.FindMessageTypeByName(name)
    return twin
