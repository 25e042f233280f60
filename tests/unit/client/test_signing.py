"""Signatures as the contract defines them, so that a peer written from it signs alike."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from kvplane.errors import BadSignatureError
from kvplane.wire import signing
from tests.helpers.refusals import refused

KEY = bytes(range(32))
PAYLOAD = b"what one plane writes for the other"


def test_a_signature_covers_the_type_and_the_digest_of_the_payload() -> None:
    digest = hashlib.sha256(PAYLOAD).digest()
    want = hmac.new(KEY, b"kvplane.plane.v1.Plan\0" + digest, hashlib.sha256).digest()
    assert signing.sign(KEY, signing.PLAN, PAYLOAD) == want
    assert signing.sign_digest(KEY, signing.PLAN, digest) == want


@pytest.mark.parametrize("num_bytes", [0, 1, 32, 63, 64, 65, 200])
def test_keys_of_all_lengths_sign_as_rfc_2104_says(num_bytes: int) -> None:
    key, digest = bytes(range(num_bytes)), hashlib.sha256(PAYLOAD).digest()
    want = hmac.new(key, b"kvplane.plane.v1.Receipt\0" + digest, hashlib.sha256).digest()
    assert [signing.sign_digest(key, signing.RECEIPT, digest) for _ in range(2)] == [want] * 2


def test_verifying_gives_the_digest_that_names_a_plan() -> None:
    signature = signing.sign(KEY, signing.PLAN, PAYLOAD)
    digest = signing.verify(KEY, signing.PLAN, signing.PLAN, PAYLOAD, signature, field="plan")
    assert digest == signing.digest(PAYLOAD) == hashlib.sha256(PAYLOAD).digest()


@pytest.mark.parametrize(
    ("type_tag", "payload", "signature", "field"),
    [
        (signing.RECEIPT, PAYLOAD, signing.sign(KEY, signing.RECEIPT, PAYLOAD), "plan.type"),
        (signing.PLAN, PAYLOAD, signing.sign(KEY, signing.RECEIPT, PAYLOAD), "plan.signature"),
        (signing.PLAN, PAYLOAD, signing.sign(bytes(32), signing.PLAN, PAYLOAD), "plan.signature"),
        (signing.PLAN, b"!" + PAYLOAD, signing.sign(KEY, signing.PLAN, PAYLOAD), "plan.signature"),
        (signing.PLAN, PAYLOAD, b"", "plan.signature"),
    ],
    ids=["type", "signed as another type", "key", "payload", "none"],
)
def test_what_was_not_signed_so_is_refused(
    type_tag: str, payload: bytes, signature: bytes, field: str
) -> None:
    with refused(BadSignatureError, field):
        signing.verify(KEY, signing.PLAN, type_tag, payload, signature, field="plan")
