"""A judge for tests: an OpenAI-compatible server in a thread, whose replies a function of the request decides."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Stub:
    """What was asked, and how many requests were open at once."""

    def __init__(self, reply: Callable[[dict[str, Any]], Any]) -> None:
        self.reply = reply
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.open = self.most_open = 0
        self.lock = threading.Lock()


@contextmanager
def judge(reply, **options):
    """(stub, options of a scorer that asks it). `reply` of a request: text, or (status, body, headers)."""
    stub = Stub(reply)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.answer(200, {"data": [{"id": "grader-7b"}, {"id": "other"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with stub.lock:
                stub.asked.append(body)
                stub.keys.append(self.headers.get("Authorization", ""))
                stub.open += 1
                stub.most_open = max(stub.most_open, stub.open)
            try:
                said = stub.reply(body)
            finally:
                with stub.lock:
                    stub.open -= 1
            if isinstance(said, tuple):
                return self.answer(*said)
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
            return self.answer(200, {"choices": [choice]})

        def answer(self, status, body, headers=()):
            text = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in dict(headers).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        yield stub, {"base_url": url, "model": "grader-7b", "deadline_s": 20, **options}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def slow(reply, seconds):
    """The same judge, later."""

    def later(body):
        time.sleep(seconds)
        return reply(body)

    return later


def shown(body) -> str:
    """The user's message of a request."""
    return body["messages"][1]["content"]


def between_marks(body) -> list[str]:
    """What a prompt shows between its lines of marks."""
    mark = next(line for line in shown(body).splitlines() if line.startswith("====== "))
    return [part.strip("\n") for part in shown(body).split(mark)[1::2]]
