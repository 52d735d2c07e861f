"""A judge for relative.yaml: an OpenAI-compatible server that ranks answers by how many digits they have copied right.

    python examples/judge/judge.py [--port 8473]

It stands in for a model behind vLLM, SGLang or a provider, whose address goes into `base_url` just so. As such judges
do, it prefers what it was shown first where two answers are equally good.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def ranking(prompt: str) -> list[int]:
    """Numbers of the answers that a prompt shows between its lines of marks, the best first."""
    mark = next(line for line in prompt.splitlines() if line.startswith("======"))
    question, _reference, *answers = (part.strip("\n") for part in prompt.split(mark)[1::2])
    wanted = question.removesuffix("=")

    def right(answer: str) -> int:
        same = sum(map(str.__eq__, wanted, answer))
        return same - abs(len(answer) - len(wanted))

    return sorted(range(1, len(answers) + 1), key=lambda number: -right(answers[number - 1]))


class Handler(BaseHTTPRequestHandler):
    """Answers `POST /v1/chat/completions`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """One request."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        verdict = {"reason": "digits in their place", "ranking": ranking(asked["messages"][-1]["content"])}
        message = {"role": "assistant", "content": json.dumps(verdict)}
        body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


class Server(ThreadingHTTPServer):
    """Takes as many connections at once as judges have slots."""

    request_queue_size = 128
    daemon_threads = True


def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8473)
    with Server(("127.0.0.1", parser.parse_args().port), Handler) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
