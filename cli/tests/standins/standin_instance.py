"""An instance that listens, announces itself in a file, starts a child of its own, and sleeps.

At SIGTERM it notes in the file `ends` whether its coordinator answers; a file `slow-KIND` makes it take 1.5 s
for that, a file `deaf-KIND` makes it not listen and not end.
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def note_the_end(kind: str, data_dir: Path) -> None:
    if (data_dir / f"slow-{kind}").exists():
        time.sleep(1.5)
    url = json.loads((data_dir / "fleet.json").read_text())["url"]
    try:
        answer = urllib.request.urlopen(f"{url}/healthz", timeout=5).status
    except OSError:
        answer = 0
    with (data_dir / "ends").open("a") as ends:
        ends.write(f"{kind} {answer}\n")
    sys.exit(0)


def run(kind: str) -> None:
    parser = argparse.ArgumentParser()
    flags = (
        "name",
        "incarnation",
        "host",
        "coordinator",
        "listen",
        "devices",
        "token-file",
        "shm-dir",
        "data-dir",
    )
    for flag in flags:
        parser.add_argument(f"--{flag}", default="")
    arguments = parser.parse_args()
    data_dir = Path(arguments.data_dir)
    deaf = (data_dir / f"deaf-{kind}").exists()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else lambda *_: note_the_end(kind, data_dir))
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    if not deaf:
        listening.listen()
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(
        sleep, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    folder = data_dir / "standins"
    folder.mkdir(exist_ok=True)
    view = {
        "name": arguments.name,
        "incarnation": arguments.incarnation,
        "kind": kind,
        "state": "READY",
        "host": arguments.host,
        "address": "127.0.0.1:1",
        "devices": arguments.devices.split(",") if arguments.devices else [],
        "child": child.pid,
    }
    aside = folder / f"{arguments.name}.new"
    aside.write_text(json.dumps(view))
    aside.replace(folder / f"{arguments.name}.json")
    time.sleep(600)
