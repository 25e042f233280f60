"""A call of the core's prefix index, for a tenant and a namespace."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.core import ControlPlane
from kvplane import ops
from kvplane.slices import run_to_end
from kvplane.wire.v1 import prefix_pb2 as pb

Owner = tuple[str, str]
"""The tenant and the namespace of a session."""


def num_cached(core: ControlPlane, pool_id: str, owner: Owner, tokens: Sequence[int]) -> int:
    """Return how many tokens of a prompt an admission would find cached."""
    tenant, namespace = owner
    request = pb.FindPrefixRequest(
        token_ids=ops.pack_tokens(tokens), namespace=namespace, pool_ids=[pool_id]
    )
    (match,) = run_to_end(core.find_prefix(request, tenant)).matches
    return min(match.num_device_tokens + match.num_host_tokens, len(tokens) - 1)
