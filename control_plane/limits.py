"""Bounds that are the same for everybody. Each says why nobody needs another value."""

from __future__ import annotations

from typing import Final

MAX_POOLS: Final = 64
"""Pools that the control plane knows at most. A pool is a model on a fleet of data planes, and a
control plane has a few. A caller that makes up names must not fill its memory with empty pools.
"""

POOL_EXPIRY_S: Final = 3600.0
"""Seconds after which a pool without data planes is forgotten. Its index survives a restart of its
data planes, which takes seconds; after an hour they will not return.
"""

MAX_UNFENCED_SESSIONS: Final = 4096
"""Ended sessions of a pool at most that some data plane has not fenced: four times as many as may
be open by default. While a data plane is away they become more, and hold their blocks.
"""

MAX_TENANT_NAMESPACES: Final = 4096
"""Namespaces of a tenant in a pool, at most, in which something is cached or a session is open.
Each takes an entry of the index beside its blocks. One for each adapter or group of users fits.
"""

MAX_WATCHERS: Final = 64
"""Streams that watch prefix indexes at one time, at most. A router or loader needs one for each
pool, and each change is encoded for each stream.
"""

NUM_KEPT_CHANGES: Final = 65_536
"""Changes kept of each prefix index. At 5,000 changes a second a watcher may be cut off for 13 s;
one further behind starts again from the whole index.
"""

MAX_WAITING_MESSAGES: Final = 4096
"""Messages that may wait for a data plane, beyond those that it resumes with. A stream so far
behind hangs or is dead: it is closed, and the data plane resumes when it can.
"""

MAX_IDEMPOTENCY_KEYS: Final = 4096
"""Requests with an idempotency key that are remembered, at most. Sessions are opened and prefixes
retained a few times a second, and a late copy of a request comes within seconds.
"""

MAX_IDEMPOTENT_ANSWER_BYTES: Final = 8 << 20
"""Bytes of the answers to them, at most. That to OpenSession lists a pool's shards: of pools of up
to 16 shards, all fit.
"""

RECEIPT_TIMEOUT_S: Final = 30.0
"""Seconds that a shard may lack the receipt of a plan that another has receipted, before the
session ends; and then seconds that it may take to fence the session, before all sessions of the
pool end. As long as the default lease, and longer than any plan runs.
"""
