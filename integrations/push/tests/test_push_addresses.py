"""Where blocks may be pushed: a host, and nothing else that gRPC takes for an address."""

from __future__ import annotations

import pytest

from kvplane.integrations.push.sender import ANY_HOST, may_send_to


@pytest.mark.parametrize("address", ["host:1", "10.0.0.1:1", "[::1]:1"])
def test_any_host_is_sent_to_where_all_are_allowed(address: str) -> None:
    assert may_send_to(address, [ANY_HOST])
    assert not may_send_to(address, ["another"])


def test_hosts_are_named_with_blanks_between_them_or_without() -> None:
    hosts = ["a", " b", "[::1]"]
    assert all(may_send_to(f"{host}:1", hosts) for host in ("a", "b", "[::1]"))
    assert not may_send_to("c:1", hosts)


@pytest.mark.parametrize(
    "address",
    ["", ":1", "unix:/run/a:1", "unix:a:1", "unix-abstract:a:1", "vsock:2:1", "dns://a/b:1"],
)
def test_only_hosts_are_sent_to(address: str) -> None:
    assert not may_send_to(address, [ANY_HOST, ""])
