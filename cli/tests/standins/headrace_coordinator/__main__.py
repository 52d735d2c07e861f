"""A coordinator that only answers /healthz and lists the stand-in instances that have started."""

import argparse
import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for flag in ("--listen", "--http", "--redis", "--data-dir", "--token-file", "--http-token-file"):
        parser.add_argument(flag, required=True)
    return parser.parse_args()


arguments = parse()
token = Path(arguments.http_token_file).read_text().strip()
registered = Path(arguments.data_dir) / "standins"
if (Path(arguments.data_dir) / "break-coordinator").exists():
    raise SystemExit("the stand-in was told to break")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/healthz":
            return self.answer(200, {"status": "ok"})
        if self.headers.get("Authorization") != f"Bearer {token}":
            return self.answer(401, {"reason": "UNAUTHENTICATED", "message": "no token", "problems": []})
        if self.path.startswith("/v1/instances"):
            return self.answer(
                200, {"instances": [json.loads(file.read_text()) for file in registered.glob("*.json")]}
            )
        if self.path.startswith("/v1/leases"):
            return self.answer(200, {"leases": [], "devices": []})
        return self.answer(200, {"runs": []})

    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def note_the_end(*_: object) -> None:
    with (Path(arguments.data_dir) / "ends").open("a") as ends:
        ends.write("coordinator\n")
    sys.exit(0)


signal.signal(signal.SIGTERM, note_the_end)
port = int(arguments.http.rpartition(":")[2])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
