"""Requests without a number that have an idempotency key: of all copies of one, one is done.

As with the HTTP field Idempotency-Key (draft-ietf-httpapi-idempotency-key-header), the key names
what its sender wants done once. A request that was refused may be sent again with its key.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import xxhash
from google.protobuf.message import Message

from control_plane import limits
from kvplane.errors import InvalidRequestError

AnswerT = TypeVar("AnswerT", bound=Message)

_KEY: Final = re.compile(r"[!-~]{1,64}")


class _Done(NamedTuple):
    """A request that was done: a digest of it, its answer, and that one's size."""

    content: bytes
    answer: Any
    num_bytes: int


class Repeats:
    """The requests that were done last, by tenant and key.

    Invariants: at most ``MAX_IDEMPOTENCY_KEYS`` are remembered, and at most
    ``MAX_IDEMPOTENT_ANSWER_BYTES`` of their answers.
    """

    def __init__(self) -> None:
        self._done: OrderedDict[tuple[str, str], _Done] = OrderedDict()
        self._num_bytes = 0

    def once(self, key: str, tenant: str, request: Any, do: Callable[[], AnswerT]) -> AnswerT:
        """Do a request unless a copy of it was done; then return that one's answer. An empty key
        does each. Raises what ``do`` raises, and InvalidRequestError naming ``idempotency-key``.
        """
        if not key:
            return do()
        if not _KEY.fullmatch(key):
            raise InvalidRequestError(
                "must be 1 to 64 visible characters of ASCII", field="idempotency-key"
            )
        encoded = request.SerializeToString(deterministic=True)
        content = xxhash.xxh3_128(type(request).__name__.encode() + encoded).digest()
        earlier = self._done.get((tenant, key))
        if earlier is None:
            answer = do()
            self._remember((tenant, key), _Done(content, answer, answer.ByteSize()))
            return answer
        if earlier.content != content:
            raise InvalidRequestError(
                "was of another request: make one up for each", field="idempotency-key"
            )
        again: AnswerT = earlier.answer
        return again

    def _remember(self, key: tuple[str, str], done: _Done) -> None:
        self._done[key] = done
        self._num_bytes += done.num_bytes
        while (
            len(self._done) > limits.MAX_IDEMPOTENCY_KEYS
            or self._num_bytes > limits.MAX_IDEMPOTENT_ANSWER_BYTES
        ):
            _, oldest = self._done.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
