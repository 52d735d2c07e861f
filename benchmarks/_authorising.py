"""What asking who may costs a request: the caller of a token, and the table about a run of another. Prints nothing."""

from __future__ import annotations

import time
from statistics import median
from types import SimpleNamespace
from typing import Any

from headrace_coordinator.access.enforcement import Enforcement
from headrace_coordinator.access.table import TABLE
from headrace_coordinator.access.tokens import Doors, digest_of
from headrace_coordinator.domain.access import SCOPES, Token
from headrace_coordinator.domain.state import EndedRun, State
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.memory_store import MemoryStore

TOKENS, RUNS = 10_000, 10_000
REQUESTS, ROUNDS = 5_000, 9
ROUTES = ("get_run", "list_trajectories", "submit_run", "get_checkpoint", "list_runs")


def authorise_us() -> float:
    """Microseconds of a core for one request, with TOKENS tokens and RUNS runs; the median of ROUNDS."""
    log = EventLog(MemoryStore(), time.time)
    log.state = State(
        tokens={
            digest_of(f"secret-{i}"): Token(f"t{i}", f"u{i % 20}", "team", [*SCOPES[:2]], 0.0, 1e12)
            for i in range(TOKENS)
        },
        ended={
            f"run-{i}": EndedRun("SUCCEEDED", 0.0, False, f"u{i % 20}", "team", "team") for i in range(RUNS)
        },
    )
    reads: Any = SimpleNamespace(owned=log.state.ended.get)
    coordinator: Any = SimpleNamespace(reads=reads)
    doors, enforcement = Doors(log, "own"), Enforcement(coordinator)
    rows = [TABLE[name] for name in ROUTES]
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for number in range(REQUESTS):
            caller = doors.known(f"secret-{number}")
            assert caller is not None
            enforcement.check(rows[number % len(rows)], caller, f"run-{number}")
        found.append((time.process_time() - began) / REQUESTS)
    return median(found) * 1e6
