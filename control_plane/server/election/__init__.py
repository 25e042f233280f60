"""Which of several control planes leads: one interface, and what holds the election.

The names here are public. A package that has another kind of election names a function such as
``kvplane.integrations.etcd.elector.elector_of`` as an entry point of the group ``kvplane.electors``
under the scheme of its ``--election``.
"""

from __future__ import annotations

from control_plane.server.election.elector import (
    RETRY_DELAY_S,
    Elector,
    has_died,
    next_incarnation,
)

__all__ = ["RETRY_DELAY_S", "Elector", "has_died", "next_incarnation"]
