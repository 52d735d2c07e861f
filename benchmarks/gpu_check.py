"""What only a GPU can show, unattended: `make gpu-check`, or `python benchmarks/gpu_check.py`.

The entries run in the order of `_gpu_plan`, each in a process of its own with a deadline, and a failed one does not
stop the next. Every finding is one JSON line on standard output: `check`, `proves`, `status` (passed, failed, late,
died, skipped), `seconds`, `figures`, and `reason` where there is something to say; the last line adds them up, with
the machine, so that the output is all that is sent. What needs more GPUs than there are, an engine that is not
installed, or more time than is left is skipped, with that reason. `--plan` says which entries would run, and how long.

Without `--limit` it takes as long as its entries may; with it an entry is begun only where all of its time is left. One
GPU without engines of their own takes nine minutes at most.

Exits 0 when nothing failed, 1 when something did, 3 without a GPU. `--device cpu` rehearses it all at small sizes on a
machine without one: memory figures mean nothing there. Where there is no network, `--wheels DIR` installs a folder's
wheels (`make gpu-check-bundle`) as they are beside this Python's own packages, into .envs/gpu-check, and goes on there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _gpu_plan import CHECKS, GRACE_S, Check, whole_s, why_not

ROOT = Path(__file__).parents[1]
NO_GPU = 3
LAST_WORDS = 1500
CARRIED = ROOT / ".envs" / "gpu-check"
"""Folder of carried packages. No environment: one made inside of another does not see that one's packages."""


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
    parser.add_argument(
        "--limit", type=float, help="seconds for all of it; default: what its entries may take"
    )
    parser.add_argument("--plan", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--gpus", type=int, help="of --plan: for so many GPUs, not for those that are here")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install before")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.wheels is not None and "HEADRACE_GPU_CHECK_WHEELS" not in os.environ:
        install(given.wheels)
        again = {**with_sources(), "HEADRACE_GPU_CHECK_WHEELS": str(given.wheels)}
        return subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=again, check=False).returncode
    gpus = given.gpus if given.gpus is not None else visible_gpus() if given.device == "gpu" else 0
    if given.one:
        return one(given.one, gpus, given.folder)
    chosen = [check for check in CHECKS if check.name in given.only]
    if given.plan:
        return planned(chosen, gpus, given.limit)
    if given.device == "gpu" and not gpus:
        say("gpu_check: this machine shows no GPU that torch can use; nothing was checked")
        return NO_GPU
    return every(chosen, gpus, given.device, given.limit)


def planned(checks: Sequence[Check], gpus: int, limit_s: float | None) -> int:
    """Prints what would run if each took all that it may; 0."""
    from _gpu_bench import missing

    left = whole_s(checks, gpus, missing) if limit_s is None else limit_s
    say(f"gpu_check: {left:.0f} s at most on {gpus or 'no'} GPUs")
    for check in checks:
        reason = why_not(check, gpus, left, missing)
        left -= 0 if reason else check.budget_s(gpus)
        told = {"check": check.name, "proves": check.proves, "seconds": check.budget_s(gpus)}
        print(json.dumps({**told, **({"skipped": reason} if reason else {})}), flush=True)
    return 0


def every(checks: Sequence[Check], gpus: int, device: str, limit_s: float | None) -> int:
    """Runs checks one after the other and prints a line for each; the exit status."""
    from _gpu_bench import missing

    limit = whole_s(checks, gpus, missing) if limit_s is None else limit_s
    ends, began_all = time.monotonic() + limit, time.monotonic()
    counts = dict.fromkeys(("passed", "failed", "late", "died", "skipped"), 0)
    say(f"gpu_check: {limit:.0f} s at most")
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-check-") as folder:
        for check in checks:
            left = ends - time.monotonic()
            began = time.perf_counter()
            if reason := why_not(check, gpus, left, missing):
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
                found = watched(command, check.budget_s(gpus) - GRACE_S)
            counts[found["status"]] += 1
            told = {
                "check": check.name,
                "proves": check.proves,
                "seconds": round(time.perf_counter() - began, 1),
            }
            print(json.dumps({**told, **found}), flush=True)
    failed = counts["failed"] + counts["late"] + counts["died"]
    summary = {**counts, "seconds": round(time.monotonic() - began_all, 1), "gpus": gpus, **machine(gpus)}
    print(json.dumps({"benchmark": "gpu_check", "figures": summary}), flush=True)
    return 1 if failed else 0


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
    import _gpu_checks
    import _gpu_runs
    from _gpu_bench import Bench

    # `every` ends what is late so: what the check has opened is closed on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # What libraries print on standard output goes to standard error.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    check = getattr(_gpu_checks, name, None) or getattr(_gpu_runs, name)
    found = check(Bench(gpus, folder))
    status = "skipped" if found.skipped else "failed" if found.problems else "passed"
    told: dict[str, Any] = {"status": status, "figures": found.figures}
    if reason := "; ".join(found.problems) or found.skipped:
        told["reason"] = reason
    print(json.dumps(told), file=answer, flush=True)
    return 0


def install(wheels: Path) -> None:
    """Puts a folder's wheels as they are into `CARRIED`, anew."""
    files = sorted(str(file) for file in wheels.glob("*.whl"))
    if not files:
        raise SystemExit(
            f"gpu_check: --wheels: {wheels} holds no wheel: make gpu-check-bundle makes such a folder"
        )
    # No index is asked and nothing is resolved: what is carried is what is wanted.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    subprocess.run([*command, "--target", str(CARRIED), *files], check=True, stdout=sys.stderr)


def with_sources() -> dict[str, str]:
    """This environment, in which the checkout's own packages need not be installed."""
    sources = [*sorted(ROOT.glob("*/src")), *sorted(ROOT.glob("*/*/src"))]
    carried = [CARRIED] if CARRIED.is_dir() else []
    path = [*map(str, [*sources, *carried]), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def visible_gpus() -> int:
    """GPUs that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def machine(gpus: int) -> dict[str, Any]:
    """What a reader of the result must know of where it was made."""
    import torch

    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "device": str(torch.cuda.get_device_name(0)) if gpus else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def say(text: str) -> None:
    """Tells the reader; standard output is for JSON alone."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
