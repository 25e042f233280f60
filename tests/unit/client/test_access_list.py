"""The access list: what its file may hold, and what a caller gets from it."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from kvplane.errors import InvalidRequestError, UnauthenticatedError
from kvplane.serving.callers import access
from kvplane.serving.callers.access import ROLES, AccessList, Caller
from kvplane.serving.config import is_loopback
from tests.helpers.refusals import refused

TOKEN = "a-token"
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()


def listed(folder: Path, text: str) -> AccessList:
    path = folder / "access.toml"
    path.write_text(text)
    return AccessList(path)


def test_without_a_file_everybody_has_every_role() -> None:
    everybody = AccessList(None)
    assert everybody.is_open
    for name, tenant in ((None, "default"), ("a", "a")):
        caller = everybody.caller(name, None)
        assert caller.tenant == tenant
        assert caller.roles == frozenset(ROLES.values())
        assert caller.may_register("any")
    assert [*map(everybody.metrics_label, ("default", "a"))] == ["default", "other"]


def test_callers_are_found_by_certificate_and_then_by_token(tmp_path: Path) -> None:
    callers = listed(
        tmp_path,
        f"""
        [[callers]]
        certificate = "gpu-3"
        roles = ["plane", "router"]
        pools = ["llama"]

        [[callers]]
        token_sha256 = "{DIGEST}"
        tenant = "search"
        roles = ["engine"]
        """,
    )
    plane = Caller("gpu-3", frozenset([ROLES["plane"], ROLES["router"]]), frozenset(["llama"]))
    engine = Caller("search", frozenset([ROLES["engine"]]))
    assert not callers.is_open
    assert callers.caller("gpu-3", None) == callers.caller("gpu-3", TOKEN) == plane
    assert callers.caller(None, TOKEN) == callers.caller("unknown", TOKEN) == engine
    assert plane.may_register("llama") and not plane.may_register("opt")
    assert not engine.may_register("llama")
    for name, token in ((None, None), ("unknown", None), (None, DIGEST), (None, ""), (DIGEST, "")):
        with pytest.raises(UnauthenticatedError):
            callers.caller(name, token)


def test_any_pool_is_a_star(tmp_path: Path) -> None:
    text = '[[callers]]\ncertificate = "p"\nroles = ["plane"]\npools = ["*"]\n'
    assert listed(tmp_path, text).caller("p", None).may_register("whatever")


ENGINE = 'roles = ["engine"]'


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("access_file", "[[callers]"),
        ("access_file", "\\xff"),
        ("access_file", "callers = 1"),
        ("access_file", f'other = 1\n[[callers]]\ncertificate = "a"\n{ENGINE}'),
        ("access_file.callers[0]", f"[[callers]]\n{ENGINE}"),
        ("access_file.callers[0]", f'[[callers]]\ncertificate = "a"\nrole = "x"\n{ENGINE}'),
        (
            "access_file.callers[0]",
            f'[[callers]]\ncertificate = "a"\ntoken_sha256 = "{DIGEST}"\n{ENGINE}',
        ),
        (
            "access_file.callers[1]",
            f'[[callers]]\ncertificate = "a"\n{ENGINE}\n[[callers]]\ncertificate = "a"\n{ENGINE}',
        ),
        ("access_file.callers[0].certificate", f"[[callers]]\ncertificate = 1\n{ENGINE}"),
        ("access_file.callers[0].token_sha256", f'[[callers]]\ntoken_sha256 = "1"\n{ENGINE}'),
        ("access_file.callers[0].tenant", f'[[callers]]\ntoken_sha256 = "{DIGEST}"\n{ENGINE}'),
        ("access_file.callers[0].roles", '[[callers]]\ncertificate = "a"'),
        ("access_file.callers[0].roles", '[[callers]]\ncertificate = "a"\nroles = ["king"]'),
        ("access_file.callers[0].roles", '[[callers]]\ncertificate = "a"\nroles = "engine"'),
        ("access_file.callers[0].pools", '[[callers]]\ncertificate = "a"\nroles = ["plane"]'),
        (
            "access_file.callers[0].pools",
            f'[[callers]]\ncertificate = "a"\npools = ["p"]\n{ENGINE}',
        ),
        ("access_file", "tenants = 1"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, field: str, text: str) -> None:
    with refused(InvalidRequestError, field):
        listed(tmp_path, text)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        AccessList(tmp_path / "none.toml")


def test_the_file_is_read_again_when_it_changes_and_kept_when_it_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_RELOAD_INTERVAL_S", 0.0)
    path = tmp_path / "access.toml"
    callers = listed(tmp_path, f'[[callers]]\ncertificate = "a"\n{ENGINE}')
    assert callers.num_reloads == 0
    assert [*map(callers.metrics_label, ("a", "bb"))] == ["a", "other"]
    path.write_text(f'[[callers]]\ncertificate = "bb"\n{ENGINE}')
    assert callers.caller("bb", None).tenant == "bb"
    assert callers.num_reloads == 1
    assert [*map(callers.metrics_label, ("a", "bb"))] == ["other", "bb"]
    with pytest.raises(UnauthenticatedError):
        callers.caller("a", None)
    for wrong in ("nonsense", None):
        path.unlink() if wrong is None else path.write_text(wrong)
        assert callers.caller("bb", None).tenant == "bb"
    assert callers.num_reloads == 1
    path.write_text("")
    os.utime(path, ns=(time.time_ns(), time.time_ns()))
    with pytest.raises(UnauthenticatedError):
        callers.caller("bb", None)


@pytest.mark.parametrize(
    ("address", "is_one"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("example.org:1", False),
    ],
)
def test_loopback_addresses(address: str, is_one: bool) -> None:
    assert is_loopback(address) is is_one
