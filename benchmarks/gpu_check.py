"""What only a GPU can show, unattended: `make gpu-check`, or `python benchmarks/gpu_check.py`. Ten minutes at most.

The checks run in their order, each in a process of its own with a deadline, and a failed one does not stop the next.
Every finding is one JSON line on standard output: `check`, `status` (passed, failed, late, died, skipped), `seconds`,
`figures`, and `reason` where there is something to say; the last line adds them up. What needs more GPUs than there
are, an engine that is not installed, or more time than is left is skipped, with that reason.

Exits 0 when nothing failed, 1 when something did, 3 without a GPU. `--device cpu` rehearses it all at small sizes on a
machine without one: memory figures mean nothing there. Where there is no network, `--wheels DIR` installs a folder's
wheels (such as vLLM's) as they are, beside this Python's own packages, into .envs/gpu-check, and goes on there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NO_GPU = 3
LIMIT_S = 600.0
LEAST_S = 15.0
"""A check that would get less is skipped."""
REHEARSAL = 3
GRACE_S = 25.0
"""To end its fleet: then it is killed."""
LAST_WORDS = 1500
ENVIRONMENT = ROOT / ".envs" / "gpu-check"


@dataclass(frozen=True)
class Check:
    """A function of _gpu_checks by name; `gpus`: the fewest that it needs, `needs`: a module."""

    name: str
    deadline_s: float
    gpus: int = 1
    needs: str = ""


CHECKS = (
    Check("basics", 60),
    Check("built_in", 90),
    Check("collocated", 150, needs="vllm"),
    Check("largest", 90),
    Check("weight_sync", 30),
    Check("lent_memory", 60),
    Check("broadcast", 60, gpus=2),
    Check("serving", 120, needs="vllm"),
    Check("prefixes", 60),
    Check("killed_rank", 90, gpus=2),
    Check("megatron", 120, gpus=2, needs="megatron"),
    Check("experts", 90),
    Check("simulated", 120, needs="mani_skill"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: a rehearsal")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="CHECK", help=", ".join(names)
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all of it")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install before")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.wheels is not None and Path(sys.prefix) != ENVIRONMENT:
        rest = [word for word in sys.argv[1:] if word not in ("--wheels", str(given.wheels))]
        return subprocess.run(
            [install(given.wheels), __file__, *rest], env=with_sources(), check=False
        ).returncode
    gpus = visible_gpus() if given.device == "gpu" else 0
    if given.one:
        return one(given.one, gpus, given.folder)
    if given.device == "gpu" and not gpus:
        say("gpu_check: this machine shows no GPU that torch can use; nothing was checked")
        return NO_GPU
    chosen = [check for check in CHECKS if check.name in given.only]
    return every(chosen, gpus, given.device, given.limit)


def every(checks: Sequence[Check], gpus: int, device: str, limit_s: float) -> int:
    """Runs checks one after the other and prints a line for each; the exit status."""
    ends, counts = (
        time.monotonic() + limit_s,
        dict.fromkeys(("passed", "failed", "late", "died", "skipped"), 0),
    )
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-check-") as folder:
        for check in checks:
            left = ends - time.monotonic()
            reason = why_not(check, gpus, left)
            began = time.perf_counter()
            if reason:
                found: dict[str, Any] = {"status": "skipped", "reason": reason}
            else:
                say(f"gpu_check: {check.name}, {left:.0f} s left")
                command = [
                    sys.executable,
                    __file__,
                    "--one",
                    check.name,
                    "--device",
                    device,
                    "--folder",
                    folder,
                ]
                # A rehearsal is done by a few slow cores.
                deadline_s = check.deadline_s * (1 if gpus else REHEARSAL)
                found = watched(command, min(deadline_s, left))
            counts[found["status"]] += 1
            line = {"check": check.name, "seconds": round(time.perf_counter() - began, 1), **found}
            print(json.dumps(line), flush=True)
    failed = counts["failed"] + counts["late"] + counts["died"]
    summary = {**counts, "gpus": gpus, "device": device_name() if gpus else "cpu"}
    print(json.dumps({"benchmark": "gpu_check", "figures": summary}), flush=True)
    return 1 if failed else 0


def why_not(check: Check, gpus: int, left_s: float) -> str:
    """Why a check cannot run; empty where it can. A rehearsal has as many processors as it takes."""
    from _gpu_bench import missing

    if left_s < LEAST_S:
        return f"no time is left: {left_s:.0f} s"
    if 0 < gpus < check.gpus:
        return f"it needs {check.gpus} GPUs and there {'is' if gpus == 1 else 'are'} {gpus}"
    return missing(check.needs) if check.needs else ""


def watched(command: Sequence[str], deadline_s: float) -> dict[str, Any]:
    """What a check's process said; `late` where it did not end in time, `died` where a signal ended it."""
    with tempfile.TemporaryFile("w+") as words:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            start_new_session=True,
            env=with_sources(),
        )
        try:
            output, _ = child.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            end(child)
            return {"status": "late", "reason": f"it did not end within {deadline_s:.0f} s", **tail(words)}
        if child.returncode == 0:
            found: dict[str, Any] = json.loads(output.splitlines()[-1])
            return found
        said = tail(words)
        if child.returncode < 0:
            return {"status": "died", "reason": f"signal {-child.returncode} ended it", **said}
        # A traceback's last line is the exception.
        reason = said.get("words", f"it ended with status {child.returncode}").splitlines()[-1]
        return {"status": "failed", "reason": reason, **said}


def end(child: subprocess.Popen[str]) -> None:
    """SIGTERM, on which a check takes its fleet down; then SIGKILL to all that it has started."""
    child.terminate()
    try:
        child.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def tail(words: Any) -> dict[str, str]:
    """The end of what a check wrote to standard error."""
    words.seek(0)
    text = words.read().strip()
    return {"words": text[-LAST_WORDS:]} if text else {}


def one(name: str, gpus: int, folder: Path) -> int:
    """Runs one check in this process, and prints what it found as the last line."""
    import _gpu_checks as checks
    from _gpu_bench import Bench

    # `every` ends what is late so: what the check has opened is closed on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # What libraries print on standard output goes to standard error.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    found = getattr(checks, name)(Bench(gpus, folder))
    status = "skipped" if found.skipped else "failed" if found.problems else "passed"
    told: dict[str, Any] = {"status": status, "figures": found.figures}
    if reason := "; ".join(found.problems) or found.skipped:
        told["reason"] = reason
    print(json.dumps(told), file=answer, flush=True)
    return 0


def install(wheels: Path) -> str:
    """Makes .envs/gpu-check over this Python's packages, with a folder's wheels as they are; its Python."""
    files = sorted(str(file) for file in wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"gpu_check: --wheels: {wheels} holds no wheel")
    python = ENVIRONMENT / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", str(ENVIRONMENT)], check=True)
    # No index is asked and nothing is resolved: what is carried is what is wanted.
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *files]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return str(python)


def with_sources() -> dict[str, str]:
    """This environment, in which the checkout's own packages need not be installed."""
    sources = [*sorted(ROOT.glob("*/src")), *sorted(ROOT.glob("*/*/src"))]
    path = [*map(str, sources), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def visible_gpus() -> int:
    """GPUs that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_name() -> str:
    """The first GPU's name."""
    import torch

    return str(torch.cuda.get_device_name(0))


def say(text: str) -> None:
    """Tells the reader; standard output is for JSON alone."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
