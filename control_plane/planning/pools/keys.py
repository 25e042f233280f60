"""A pool's keys: the one that signs, the next one while shards confirm it, and the former ones for
whose plans receipts are still due.

    signs:      A ─────────────► A ─────────────► B ─────────────► B
    shards hold A      A and B offered to all     A retired        B alone
                       B confirmed by all ──┘      └── confirmed by all

``rotation.py`` moves it on. Keys are numbered as they are made. Receipts are signed with the newest
key that a shard holds, so that of a plan is signed with the plan's key or with a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvplane.wire import signing


class PoolKeys:
    """The keys of one pool."""

    present: bytes
    """Signs plans and grants."""
    next: bytes
    """Offered to the shards; empty while there is none."""

    def __init__(self, new_key: Callable[[], bytes] = signing.new_key) -> None:
        self._new_key = new_key
        self.number = 0
        """Of the present key."""
        self.start_over()

    def start_over(self) -> None:
        """Forget all keys: the pool begins with a new one, or with other shards."""
        self.number += 1
        self.present, self.next = self._new_key(), b""
        self.is_retiring = False  # some shard has not confirmed yet that it dropped the one before
        self.since_s: float | None = None  # when the present one began to sign, once that is known
        self.step_s: float | None = None  # when the present step of a rotation began
        self.is_late = False  # that was logged
        self.is_due = False  # an operator wants another one, whatever its age
        self._former: dict[int, bytes] = {}  # by number, the newest first

    @property
    def present_id(self) -> bytes:
        """Identifies the present key."""
        return signing.key_id(self.present)

    @property
    def next_id(self) -> bytes:
        """Identifies the next key; empty while there is none."""
        return signing.key_id(self.next)

    @property
    def num_former(self) -> int:
        """Former keys for whose plans receipts are still due."""
        return len(self._former)

    def make_next(self) -> None:
        """Make a key to be offered. There is none yet."""
        self.is_due = False
        self.next = self._new_key()

    def switch(self) -> None:
        """Let the next key sign; the present one becomes the latest of the former ones."""
        self._former = {self.number: self.present, **self._former}
        self.number += 1
        self.present, self.next = self.next, b""
        self.is_retiring = True

    def forget_former(self, needed: Iterable[int]) -> None:
        """Forget the former keys that are older than all of ``needed``, numbers of keys that signed
        plans in flight.
        """
        oldest = min(needed, default=self.number)
        self._former = {n: key for n, key in self._former.items() if n >= oldest}

    def verify_receipt(self, type_tag: str, payload: bytes, signature: bytes, field: str) -> int:
        """The number of the key that signed a receipt. Raises BadSignatureError naming ``field``
        if none of them has.
        """
        if type_tag == signing.RECEIPT:  # of the present key, as nearly all are
            digest = signing.digest(payload)
            if signing.is_signed(self.present, signing.RECEIPT, digest, signature):
                return self.number
        keys = {self.number: self.present, **self._former}
        if self.next:
            keys = {self.number + 1: self.next, **keys}
        i, _ = signing.verify_any(
            [*keys.values()], signing.RECEIPT, type_tag, payload, signature, field=field
        )
        return [*keys][i]
