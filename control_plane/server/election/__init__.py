"""An election decides which of several control planes leads: by a file or by Kubernetes.

The names here are public. To add another kind of election, a package registers a function such as
``kvplane.integrations.etcd.elector.elector_of`` in the entry-point group ``kvplane.electors``. The
entry point's name is the URL scheme of ``--election``.
"""

from __future__ import annotations

from control_plane.server.election.elector import (
    RETRY_DELAY_S,
    Elector,
    has_died,
    next_incarnation,
)

__all__ = ["RETRY_DELAY_S", "Elector", "has_died", "next_incarnation"]
