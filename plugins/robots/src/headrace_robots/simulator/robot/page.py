"""The operator's page, on the loopback of the robot's host: stop, clear, confirm, take over, success and failure.

Anybody on the host may stop the robot. All else asks for the secret that the page itself has, so that a page of another
place in the same browser cannot do it.
"""

from __future__ import annotations

import html
import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from headrace_servicekit.rpc.addresses import LOOPBACK
from headrace_simulator.backends.base import BackendError

from headrace_robots.simulator.robot.setup import VARIABLE
from headrace_robots.simulator.robot.station import Station

_MOST_BYTES = 4096
_MARKS = ("confirmed", "success", "failure", "again")
_PAGE = """<!doctype html><meta charset="utf-8"><title>Robot</title>
<style>body{font:18px sans-serif;max-width:40em;margin:2em auto}button{font-size:20px;margin:.3em;padding:.6em 1em}
#stop{background:#c00;color:#fff;width:100%;font-size:40px}</style>
<button id="stop" onclick="say('stop')">STOP (space)</button>
<p>The robot <b id="state"></b>. <span id="why"></span></p>
<p><button onclick="say('clear')">Clear the stop</button>
<button onclick="say('confirmed')">The scene is ready: begin</button></p>
<p><button onclick="say('success')">Success</button><button onclick="say('failure')">Failure</button>
<button onclick="say('again')">Do it again</button></p>
<p><button onclick="say('take')">I take over</button><button onclick="say('give')">The policy goes on</button>
<label>My name <input id="operator" maxlength="100" value="OPERATOR"></label></p>
<script>
const key = "SECRET", show = (id, text) => { document.getElementById(id).textContent = text; };
const say = what => fetch("/" + what, {method: "POST", headers: {"X-Robot-Key": key},
  body: new URLSearchParams({operator: document.getElementById("operator").value})});
document.onkeydown = e => {
  if (e.code === "Space" && e.target.tagName !== "INPUT") { e.preventDefault(); say("stop"); } };
const look = () => fetch("/state").then(r => r.json()).then(s => { show("state", s.state); show("why", s.why); })
  .catch(() => show("state", "does not answer: its process has ended"));
setInterval(look, 300); look();
</script>"""


class Page:
    """Serves it in threads of its own. Raises BackendError where the port is taken."""

    def __init__(self, station: Station) -> None:
        key = secrets.token_urlsafe(16)

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                if not self._from_here():
                    return
                if self.path == "/state":
                    state = {"state": station.state, "why": station.why, "operator": station.operator}
                    self._say(200, json.dumps(state), "application/json")
                elif self.path == "/":
                    shown = _PAGE.replace("SECRET", key).replace("OPERATOR", html.escape(station.operator))
                    self._say(200, shown, "text/html; charset=utf-8")
                else:
                    self._say(404, "there is / and /state")

            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                given = parse_qs(self.rfile.read(min(size, _MOST_BYTES)).decode(errors="replace"))
                what, (operator, *_) = self.path[1:], given.get("operator", [""])
                if what == "stop":
                    station.stop(operator or "the page")
                elif not self._from_here():
                    return
                elif not secrets.compare_digest(self.headers.get("X-Robot-Key", "").encode(), key.encode()):
                    return self._say(403, "this is said on the page alone")
                elif what == "clear":
                    station.clear()
                elif what in ("take", "give"):
                    if station.setup.teleoperator is None:
                        return self._say(409, "the robot file has no teleoperator")
                    station.operator, station.taken_over = operator[:100] or station.operator, what == "take"
                elif what in _MARKS:
                    station.say(what, operator[:100])
                else:
                    return self._say(404, "there is stop, clear, take, give, " + ", ".join(_MARKS))
                self._say(200, "done")

            def _from_here(self) -> bool:
                """Another name for this address is one that a stranger has given it."""
                if self.headers.get("Host", "").rpartition(":")[0] in (LOOPBACK, "localhost"):
                    return True
                self._say(403, f"write http://{LOOPBACK}")
                return False

            def _say(self, status: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("X-Frame-Options", "DENY")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                return

        port = station.setup.page_port
        try:
            self._server = ThreadingHTTPServer((LOOPBACK, port), Handler)
        except OSError as error:
            station.close()
            raise BackendError(
                VARIABLE, f"page_port: {port} cannot be had ({error.strerror}); give another"
            ) from error
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="page", daemon=True).start()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://{LOOPBACK}:{self._server.server_address[1]}"

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
