"""What a stranger may do to the HTTP API, to its relay and to a rollout's endpoint for agents, on a real fleet."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
import yaml
from harness.processes import ROOT
from harness.waiting import wait_for

ENDED_S = 25.0
"""A connection that shows no key, or sends too slowly, is over by then."""
HELD = 48 << 20
"""Bytes that 24 connections without a key may cost a process."""
BIG = 31 << 20


@dataclass(frozen=True)
class Door:
    """An address that a stranger reaches: a name for people, host and port, a path, and the key that is good there."""

    name: str
    port: int
    path: str
    key: str
    process: psutil.Process

    def head(self, key: str = "", **headers: str) -> bytes:
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: 127.0.0.1:{self.port}",
            "Content-Type: application/json",
        ]
        lines += [f"Authorization: Bearer {key}"] if key else []
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode()


@pytest.fixture(scope="module")
def doors(fleet, tiny_model) -> Iterator[list[Door]]:
    spec: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "agents" / "online.yaml").read_text())
    spec["model"]["path"] = str(tiny_model)
    run = fleet.submit(spec | {"export": False})
    found = wait_for(lambda: _served(fleet, run.id), "the online run to be served")
    rollout, coordinator = fleet.process("rollout-0"), fleet.process("coordinator")
    own = next(each.laddr.port for each in rollout.net_connections() if _speaks_http(each))
    relayed = f"/v1/runs/{run.id}/endpoint/v1"
    yield [
        Door("responses", own, "/v1/responses", found["api_key"], rollout),
        Door("feedback", own, "/v1/feedback", found["api_key"], rollout),
        Door("relay", fleet.port, f"{relayed}/chat/completions", found["api_key"], coordinator),
        Door("runs", fleet.port, "/v1/runs", fleet.token, coordinator),
    ]
    fleet.end_runs()


def _served(fleet: Any, run: str) -> dict[str, str] | None:
    found: dict[str, str] = httpx.get(f"{fleet.url}/v1/runs/{run}/endpoint", headers=fleet.headers).json()
    return found if found.get("base_url") else None


def _speaks_http(connection: Any) -> bool:
    if connection.status != psutil.CONN_LISTEN:
        return False
    with suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{connection.laddr.port}/v1/models", timeout=5).status_code == 401
    return False


def _heard(sent: bytes, door: Door, more: bytes = b"", every_s: float = 0.0) -> tuple[bytes, float]:
    """What is answered until the connection ends, and how long that took; sends `more`, or a byte of it at a time."""
    began, heard = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", door.port)) as connection:
        connection.settimeout(every_s or ENDED_S)
        with suppress(ConnectionError):
            connection.sendall(sent + (b"" if every_s else more))
        while time.monotonic() - began < ENDED_S:
            try:
                piece = connection.recv(65536)
                heard += piece
                if not piece:
                    return heard, time.monotonic() - began
            except TimeoutError:
                with suppress(ConnectionError):
                    connection.sendall(more[:1])
            except ConnectionError:
                return heard, time.monotonic() - began
    raise AssertionError(
        f"{door.name}: the connection is still open after {ENDED_S:g} s; heard {heard[:200]!r}"
    )


def test_bodies_without_a_key_are_not_read_and_hold_no_memory(doors):
    """24 connections held 770 MiB of a rollout for ever."""
    for door in doors:
        before = door.process.memory_info().rss
        with ThreadPoolExecutor(24) as strangers:
            head = door.head(Content_Length=str(BIG + 1))
            told = [*strangers.map(lambda _, h=head, d=door: _heard(h, d, bytes(BIG)), range(24))]
        assert door.process.memory_info().rss - before < HELD, door.name
        answered = [heard for heard, _ in told if heard]
        assert answered and all(heard.startswith(b"HTTP/1.1 401 ") for heard in answered), door.name


KINDS = ("silent", "half a head", "slow with a key", "slow chunks with a key", "slow without a key", "unread")


def test_whoever_sends_slowly_is_ended_by_a_deadline(doors):
    """One byte each second: no reader of heads or bodies waits for it."""

    def play(door: Door, kind: str) -> tuple[str, str, bytes]:
        slow = {"Content_Length": "1000"}
        sent = {
            "silent": b"",
            "half a head": door.head()[:-2] + b"X-Slow: ",
            "slow with a key": door.head(door.key, **slow) + b"{",
            "slow chunks with a key": door.head(door.key, Transfer_Encoding="chunked") + b"1\r\n{\r\n",
            "slow without a key": door.head(**slow),
            "unread": door.head(**slow).replace(b"POST " + door.path.encode(), b"POST /healthz"),
        }[kind]
        more = b"1\r\n \r\n" if "chunks" in kind else b" "
        heard, _ = _heard(sent, door, b"" if kind == "silent" else more, 1.0)
        return door.name, kind, heard

    with ThreadPoolExecutor(len(doors) * len(KINDS)) as strangers:
        playing = [strangers.submit(play, door, kind) for door in doors for kind in KINDS]
        told = {(door, kind): heard for door, kind, heard in (each.result() for each in playing)}
    for door in doors:
        assert told[door.name, "slow with a key"].startswith(b"HTTP/1.1 408 "), door.name
        assert told[door.name, "slow without a key"].startswith(b"HTTP/1.1 401 "), door.name


@pytest.mark.parametrize(
    "more", [{"Expect": "100-continue", "Content_Length": "9"}, {"Content_Encoding": "gzip"}]
)
def test_nobody_is_asked_for_a_body_before_the_key(doors, more):
    for door in doors:
        heard, _ = _heard(door.head("wrong", **more), door)
        assert heard.startswith(b"HTTP/1.1 401 "), door.name
        assert b"nosniff" in heard and b"no-store" in heard, door.name


@pytest.mark.parametrize(
    ("more", "body", "status"),
    [
        ({"Content_Length": str(1 << 40)}, b"", 413),
        ({"Content_Encoding": "gzip", "Content_Length": "2"}, b"{}", 415),
    ],
)
def test_with_a_key_what_is_too_long_or_packed_is_refused_by_its_head(doors, more, body, status):
    for door in doors:
        heard, _ = _heard(door.head(door.key, **more), door, body)
        assert heard.startswith(b"HTTP/1.1 %d " % status), (door.name, heard)


def test_an_endless_head_is_refused(doors):
    for door in doors:
        heard, _ = _heard(door.head()[:-2] + b"X-Long: ", door, bytes(1 << 20))
        assert not heard or heard.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 ")), door.name


def test_the_relay_tells_nobody_without_a_key_which_runs_exist(doors, fleet):
    relay = next(each for each in doors if each.name == "relay")
    known = relay.path.split("/")[3]
    fake = f"sk-headrace-{'0' * 16}-{'1' * 64}"
    keys = ("", "wrong", "é", fake)
    told = set()
    with httpx.Client(base_url=fleet.url, timeout=20, trust_env=False) as client:
        for run in (known, "nobody-000000", "x" * 300):
            for path, method in itertools.product(
                ("chat/completions", "sessions", "nothing"), ("GET", "POST")
            ):
                for key in keys:
                    headers = [("Authorization", f"Bearer {key}".encode("latin-1"))] if key else []
                    answer = client.request(method, f"/v1/runs/{run}/endpoint/v1/{path}", headers=headers)
                    told.add((answer.status_code, answer.text))
    assert len(told) == 1 and next(iter(told))[0] == 401, told


def test_those_with_a_key_are_answered_while_strangers_hold_all_connections(doors, fleet):
    """Connections that have shown no key make room."""
    relay, own = doors[2], doors[0]
    held: list[socket.socket] = []
    try:
        for door in (relay, own):
            for _ in range(700):
                with suppress(OSError):
                    held.append(socket.create_connection(("127.0.0.1", door.port), timeout=5))
        assert httpx.get(f"{fleet.url}/v1/runs", headers=fleet.headers, timeout=20).status_code == 200
        models = f"http://127.0.0.1:{own.port}/v1/models"
        shown = {"Authorization": f"Bearer {own.key}"}
        assert httpx.get(models, headers=shown, timeout=20).status_code == 200
    finally:
        for each in held:
            each.close()
