"""A user's scorer that prints which of its service's own things it reaches."""

import json
import os
import signal
import sys
from pathlib import Path

SERVICE = os.getppid()
SETS = ("CapInh", "CapPrm", "CapEff", "CapAmb")
TRIES = {
    "its own home": lambda: Path.home().joinpath("own").write_text(""),
    "token": lambda: Path("/secrets/fleet/fleet-token").read_text(),
    "another link to the token": lambda: os.link("/secrets/fleet/fleet-token", Path.home() / "token"),
    "mode of the token": lambda: os.chmod("/secrets/fleet/fleet-token", 0o666),
    "folder of the token": lambda: Path("/secrets/fleet/new").write_text(""),
    "key of the certificate": lambda: Path("/tls/host-key.pem").read_bytes(),
    "weights": lambda: Path("/weights/new").write_text(""),
    "runs": lambda: Path("/data/new").write_text(""),
    "environment of the service": lambda: Path(f"/proc/{SERVICE}/environ").read_bytes(),
    "memory of the service": lambda: Path(f"/proc/{SERVICE}/mem").open("rb").close(),
    "descriptors of the service": lambda: os.listdir(f"/proc/{SERVICE}/fd"),
    "root of the service": lambda: os.listdir(f"/proc/{SERVICE}/root"),
    "signal to the service": lambda: os.kill(SERVICE, signal.SIGCONT),
    "signal to its supervisor": lambda: os.kill(parent_of(SERVICE), signal.SIGCONT),
    "signal to the first process": lambda: os.kill(1, signal.SIGCONT),
    "niceness of the service": lambda: os.setpriority(os.PRIO_PROCESS, SERVICE, 19),
    "user 0": lambda: os.setuid(0),
    "user of the service": lambda: os.setuid(10001),
    "installed packages": lambda: Path("/opt/headrace/evil.pth").write_text(""),
}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def reached(deed) -> bool:
    try:
        deed()
    except OSError:
        return False
    return True


def found() -> dict:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        "service": Path(f"/proc/{SERVICE}/cmdline").read_text().split("\0")[:3],
        "user": os.getresuid() + os.getresgid(),
        "groups": os.getgroups(),
        "capabilities": "".join(line.split()[1] for line in lines if line.startswith(SETS)),
        "reached": [name for name, deed in TRIES.items() if reached(deed)],
    }


print(f"FOUND {json.dumps(found())}", file=sys.stderr, flush=True)


def score(prompt, completion, reference, metadata):
    return float(len(completion))
