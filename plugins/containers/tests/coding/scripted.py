"""A policy that says what a list says: an OpenAI-compatible server for agents that others wrote."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def scripted(commands: Sequence[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its base URL, and the requests that it has had; each answer is a call of `bash` with the next command."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            command = commands[min(len(asked), len(commands)) - 1]
            function = {"name": "bash", "arguments": json.dumps({"command": command})}
            message = {
                "role": "assistant",
                "content": "So:",
                "tool_calls": [{"id": f"c{len(asked)}", "type": "function", "function": function}],
            }
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            body = {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": "policy",
                "choices": [choice],
                "usage": usage,
            }
            text = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *given: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()
