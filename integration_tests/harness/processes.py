"""Processes seen from outside: who belongs to a fleet, which ports are free, what an environment may hold."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
from headrace_servicekit.rpc.addresses import free_port

__all__ = ["ROOT", "alive", "clean_environment", "free_port", "mentioning", "run_python", "words_of"]

ROOT = Path(__file__).resolve().parents[2]


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without settings of Headrace, and with one compute thread."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200", "NO_COLOR": "1"}
    return {**kept, **quiet, **extra}


def run_python(*arguments: str | Path, timeout_s: float = 180.0, **environment: str) -> str:
    """Output of `python …`; fails the test unless it succeeds."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def words_of(process: psutil.Process) -> list[str]:
    """Command line; empty for a process that is gone, a zombie or another user's."""
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:
        return []


def alive(process: psutil.Process) -> bool:
    """Whether the very process still runs; a zombie does not."""
    return process.is_running() and bool(words_of(process))


def mentioning(text: str) -> Iterator[psutil.Process]:
    """Living processes whose command line or environment holds a text, but ours."""
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        if process.pid not in mine and _mentions(process, text):
            yield process


def _mentions(process: psutil.Process, text: str) -> bool:
    words = words_of(process)
    if any(text in word for word in words):
        return True
    try:
        return bool(words) and any(text in value for value in process.environ().values())
    except (psutil.Error, OSError):
        return False
