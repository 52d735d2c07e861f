"""An instance that announces itself in a file, starts a child of its own, and sleeps."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path


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
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(
        sleep, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    folder = Path(arguments.data_dir) / "standins"
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
