"""Gloo and NCCL listen on the interface at which a service is reached."""

import os

import pytest
from headrace_servicekit.rpc import addresses as interfaces

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("listen", "wanted"),
    [("127.0.0.1:0", "lo"), ("10.0.0.5:7000", "eth3"), ("0.0.0.0:7000", None), ("10.0.0.6:7000", None)],
)
def test_collectives_take_the_interface_of_listen(monkeypatch, listen, wanted):
    monkeypatch.setattr(interfaces, "own_addresses", lambda: {"10.0.0.5": "eth3", "127.0.0.1": "lo"})
    for name in (GLOO, NCCL):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    interfaces.keep_collectives_at(listen)
    assert (os.environ.get(GLOO), os.environ.get(NCCL)) == (wanted, wanted and f"={wanted}")


def test_what_the_environment_says_stays(monkeypatch):
    monkeypatch.setenv(GLOO, "ib0")
    monkeypatch.setenv(NCCL, "ib1")
    interfaces.keep_collectives_at("127.0.0.1:0")
    assert (os.environ[GLOO], os.environ[NCCL]) == ("ib0", "ib1")
