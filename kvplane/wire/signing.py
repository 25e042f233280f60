"""Signatures of the payloads that the planes write for each other and clients carry.

HMAC-SHA256 (RFC 2104) under a key that only the two planes of a pool share. The type tag is signed
too, so that a receipt cannot pass for a plan. The signature covers the payload's SHA-256, which
also identifies a plan, so both take a single pass over the bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from functools import lru_cache
from typing import Any, Final

from kvplane.errors import BadSignatureError

KEY_BYTES: Final = 32

PLAN: Final = "kvplane.plane.v1.Plan"
RECEIPT: Final = "kvplane.plane.v1.Receipt"
GRANT: Final = "kvplane.plane.v1.SessionGrant"
PIN_GRANT: Final = "kvplane.plane.v1.PinGrant"

_BLOCK_BYTES: Final = 64
_NUM_KEYS: Final = 64
_NOTHING: Final = hashlib.sha256()


def new_key() -> bytes:
    """Make a random signing key of ``KEY_BYTES`` bytes."""
    return secrets.token_bytes(KEY_BYTES)


def sign(key: bytes, type_tag: str, payload: bytes) -> bytes:
    """Return the 32-byte signature of ``payload`` as a payload of type ``type_tag``."""
    return sign_digest(key, type_tag, digest(payload))


def sign_digest(key: bytes, type_tag: str, payload_digest: bytes) -> bytes:
    """Return the 32-byte signature of the payload whose ``digest`` is given."""
    begun = _begun(key, type_tag)
    inner, outer = begun[0].copy(), begun[1].copy()
    inner.update(payload_digest)
    outer.update(inner.digest())
    signature: bytes = outer.digest()
    return signature


def verify(
    key: bytes, want_type: str, type_tag: str, payload: bytes, signature: bytes, *, field: str
) -> bytes:
    """Check a signature and return the payload's ``digest``. Raises BadSignatureError naming
    ``field`` unless it is a ``want_type`` signed with ``key``.
    """
    if type_tag != want_type:
        raise BadSignatureError(f"expected a signed {want_type}", field=f"{field}.type")
    payload_digest = digest(payload)
    if not hmac.compare_digest(sign_digest(key, type_tag, payload_digest), signature):
        raise BadSignatureError(
            "does not match: the payload was changed, or signed with another key",
            field=f"{field}.signature",
        )
    return payload_digest


def key_id(key: bytes) -> bytes:
    """Return 16 bytes that identify a key without revealing it; empty for no key."""
    return hmac.digest(key, b"kvplane.v1.KeyId", "sha256")[:16] if key else b""


def digest(payload: bytes) -> bytes:
    """Return the SHA-256 of a payload, which is what is signed and what identifies a plan."""
    state = _NOTHING.copy()  # OpenSSL takes longer to make a state than to hash a short payload
    state.update(payload)
    return state.digest()


@lru_cache(_NUM_KEYS)
def _begun(key: bytes, type_tag: str) -> tuple[Any, Any]:
    """Return the two hashes of an HMAC (RFC 2104, section 4) after key and type."""
    if len(key) > _BLOCK_BYTES:
        key = hashlib.sha256(key).digest()
    padded = key.ljust(_BLOCK_BYTES, b"\0")
    inner, outer = bytes(byte ^ 0x36 for byte in padded), bytes(byte ^ 0x5C for byte in padded)
    return hashlib.sha256(inner + type_tag.encode() + b"\0"), hashlib.sha256(outer)
