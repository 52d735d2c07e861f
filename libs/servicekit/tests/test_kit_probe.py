"""The health check of a container: what it says of a server, and by which exit status."""

import asyncio
import socket

import pytest
from headrace_servicekit.process.probe import main
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.rpc.tls import VARIABLE


async def ask(*arguments):
    return await asyncio.to_thread(main, arguments)


async def test_a_server_is_healthy_until_it_drains(capfd):
    server = GrpcServer("127.0.0.1:0", token="secret")
    address = await server.start()
    assert await ask(address) == 0
    await server._health.enter_graceful_shutdown()
    assert await ask(address) == 1
    assert "NOT_SERVING" in capfd.readouterr().out
    await server.drain(0)


@pytest.mark.parametrize("role", ["reward", "coordinator"])
async def test_without_an_address_it_asks_this_hosts_own_server(monkeypatch, certified, role):
    """With the server's own files: it listens beyond the loopback, and so takes nobody without a certificate."""
    certified(role)
    server = GrpcServer("0.0.0.0:0", token="secret")
    monkeypatch.setenv("HEADRACE_LISTEN", await server.start())
    assert await ask() == 0
    monkeypatch.delenv(VARIABLE)
    assert await ask() == 1
    await server.drain(0)


async def test_it_asks_every_server_that_the_container_has(monkeypatch, capfd, certified):
    certified()
    server = GrpcServer("0.0.0.0:0", token="secret")
    monkeypatch.setenv("HEADRACE_LISTEN", await server.start())
    monkeypatch.setenv("HEADRACE_COUNT", "2")
    assert await ask() == 1
    assert [line.split()[1] for line in capfd.readouterr().out.splitlines()] == ["SERVING", "UNAVAILABLE"]
    await server.drain(0)


def test_nobody_listening_is_not_healthy(capfd):
    with socket.socket() as bound:  # bound and not listening: nobody else takes the port
        bound.bind(("127.0.0.1", 0))
        assert main([f"127.0.0.1:{bound.getsockname()[1]}"]) == 1
    assert "UNAVAILABLE" in capfd.readouterr().out
