"""Secrets that a spec refers to: the code that uses them gets them, and nothing that a fleet keeps or shows has one."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import redis
from harness.fleet import Fleet
from harness.processes import words_of
from harness.waiting import wait_for
from headrace.client import HeadraceError

VARIABLE, FILE = "canary-of-a-variable-7d1f", "canary-of-a-file-93ab"
OPEN = "written-in-the-open-55c0"
"""What is no secret: the search finds it in all places, so it would find a canary."""
SERVER = """
import hashlib, os
from mcp.server import MCPServer

server = MCPServer("test")
got = os.environ["A"] + os.environ["B"]
with open({got!r}, "w") as file:
    file.write(hashlib.sha256(got.encode()).hexdigest())


@server.tool(description="shows " + got)
async def show() -> str:
    return got


server.run()
"""
SCORER = """
def score(completion, key, headers, remark):
    if len(completion) > 2:
        raise ValueError(f"401 for {key} and {headers}")
    return float(len(completion))
"""


class Judge(BaseHTTPRequestHandler):
    """Gives 5 to everything, and refuses each third request with what it was shown."""

    keys: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.keys.append(self.headers.get("Authorization", ""))
        busy = len(self.keys) % 3 == 0
        said = json.dumps({"reason": "seen", "score": 5})
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        body = {"error": f"busy, {self.keys[-1]}"} if busy else {"choices": [choice]}
        text = json.dumps(body).encode()
        self.send_response(503 if busy else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *given: Any) -> None:
        return


@pytest.fixture
def judge() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def spec_in(folder: Path, model: Path, judge: str) -> dict[str, Any]:
    """A run whose tools, judge and scorer need secrets."""
    (folder / "server.py").write_text(SERVER.format(got=str(folder / "got")))
    (folder / "mine.py").write_text(SCORER)
    (folder / "secret").write_text(FILE + "\n")
    (folder / "secret").chmod(0o600)
    (folder / "rows.jsonl").write_text("".join(f'{{"question": "{n} + 1"}}\n' for n in range(16)))
    file = f"file:{folder}/secret"
    server = {"command": [sys.executable, str(folder / "server.py")], "env": {"A": "env:CANARY", "B": file}}
    own = {"key": file, "headers": {"Authorization": "Bearer env:CANARY"}, "remark": OPEN}
    return {
        "name": "secrets",
        "workflow": "agentic",
        "steps": 2,
        "model": {"path": str(model), "dtype": "float32"},
        "environment": {"tasks": ["tools"], "count": 4, "options": {"mcp": [server], "tools": []}},
        "data": {"source": "jsonl", "options": {"path": str(folder / "rows.jsonl")}},
        "sampling": {"max_new_tokens": 4},
        "algorithm": {"prompts_per_step": 2, "group_size": 4},
        "reward": {
            "timeout_s": 90,
            "scorers": [
                {"name": "judge", "options": {"base_url": judge, "model": "m", "api_key": "env:CANARY"}},
                {"name": f"{folder}/mine.py:score", "options": own},
            ],
        },
        "recording": {"keep": "all"},
        "export": False,
    }


def files_of(fleet: Fleet) -> Iterator[tuple[str, bytes]]:
    """The data directory: logs, histories, trajectories, recordings, the store's files."""
    for file in fleet.data_dir.rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":
            content = file.read_bytes()
            yield f"file {file}", gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content


def store_of(fleet: Fleet) -> Iterator[tuple[str, bytes]]:
    """All that Redis holds."""
    told = " ".join(words_of(fleet.process("store")))  # its title has the socket, once it serves
    client = redis.Redis(unix_socket_path=told.partition("unixsocket:")[2].split()[0])
    ask = {b"string": client.get, b"hash": client.hgetall, b"set": client.smembers, b"stream": client.xrange}
    ask |= {b"list": lambda key: client.lrange(key, 0, -1), b"zset": lambda key: client.zrange(key, 0, -1)}
    for key in client.scan_iter():
        yield f"key {key!r} of the store", repr(ask[client.type(key)](key)).encode()
    client.close()


def answers_of(fleet: Fleet, run: str) -> Iterator[tuple[str, bytes]]:
    """What every GET of the API says of the run, streams of events among them."""
    with httpx.Client(base_url=fleet.url, headers=fleet.headers, timeout=3.0) as client:
        paths = client.get("/openapi.json").json()["paths"]
        for path in (each for each, methods in paths.items() if "get" in methods):
            told = b""
            try:
                with client.stream("GET", path.replace("{run_id}", run).replace("{run}", run)) as answer:
                    for piece in answer.iter_raw():
                        told += piece
            except httpx.ReadTimeout:
                pass  # a stream that goes on
            yield f"GET {path}", told


def commands_of(fleet: Fleet) -> Iterator[tuple[str, bytes]]:
    for process in fleet.look():
        yield f"command of process {process.pid}", " ".join(words_of(process)).encode()


def test_no_secret_of_a_spec_is_kept_or_shown(own_fleet, tiny_model, judge, tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    folder.chmod(0o777)
    spec = spec_in(folder, tiny_model, judge)
    with own_fleet("--simulator", "1", CANARY=VARIABLE) as fleet:
        for key, literal in (("api_key", VARIABLE), ("base_url", f"http://me:{VARIABLE}@127.0.0.1/v1")):
            wrong = json.loads(json.dumps(spec))
            wrong["reward"]["scorers"][0]["options"][key] = literal
            with pytest.raises(HeadraceError) as refused:
                fleet.submit(wrong)
            (told,) = refused.value.problems
            assert told.key == f"reward.scorers[0].options.{key}" and "env:NAME" in told.fix
            assert VARIABLE not in f"{told} {refused.value}"
        wrong = json.loads(json.dumps(spec))
        wrong["environment"]["options"]["mcp"][0]["env"]["A"] = "env:NO_SUCH"
        with pytest.raises(HeadraceError) as refused:
            fleet.submit(wrong)
        assert "environment.options.mcp[0].env.A" in str(refused.value.problems)
        run = fleet.submit(spec)
        fleet.reach(run, 1)
        running = [*commands_of(fleet)]
        fleet.succeed(run)
        assert set(Judge.keys) == {f"Bearer {VARIABLE}"}
        assert (folder / "got").read_text() == hashlib.sha256((VARIABLE + FILE).encode()).hexdigest()
        wait_for(lambda: fleet.client.recordings(run.id).recordings, "a recording")

        kept = [*files_of(fleet), *store_of(fleet), *answers_of(fleet, run.id), *running, *commands_of(fleet)]
        shown = [name for name, content in kept if VARIABLE.encode() in content or FILE.encode() in content]
        assert not shown
        in_the_open = {name for name, content in kept if OPEN.encode() in content}
        for words in ("run.json", "recording", "key b'", "GET /v1/runs/{"):
            assert any(words in name for name in in_the_open), (
                f"{words} is not searched: {sorted(in_the_open)}"
            )
        details = [content for name, content in kept if b"401 for file:" in content]
        assert details, "the scorer's own error is kept, with references in it"
