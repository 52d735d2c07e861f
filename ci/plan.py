"""Which parts there are and how long each may take. Budgets are for two slow cores: they name a hang, no more."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
PACKAGES = (
    *(
        "headrace_servicekit",
        "headrace_schema",
        "headrace_modelkit",
        "headrace_coordinator",
        "headrace_rollout",
    ),
    *("headrace_trainer", "headrace_simulator", "headrace_reward", "headrace_cli", "headrace.client"),
)
UNITS = {
    "proto": "proto",
    "servicekit": "libs/servicekit",
    "schema": "libs/schema",
    "modelkit": "libs/modelkit",
    "coordinator": "services/coordinator",
    "rollout": "services/rollout",
    "trainer": "services/trainer",
    "simulator": "services/simulator",
    "reward": "services/reward",
    "cli": "cli",
}


@dataclass(frozen=True)
class Part:
    """One command; `needs` is the folder whose tests it runs, empty for anything but pytest."""

    name: str
    command: tuple[str, ...]
    timeout_s: int
    needs: str = ""

    def with_report(self, file: Path) -> list[str]:
        """The command, which also writes what it found to a JUnit file when it is pytest."""
        return [*self.command, f"--junitxml={file}"] if self.needs else [*self.command]


def _tool(name: str, program: str, *arguments: str, timeout_s: int = 300) -> Part:
    return Part(name, (str(BIN / program), *arguments), timeout_s)


def _script(name: str, *arguments: str, timeout_s: int = 300) -> Part:
    return Part(name, (sys.executable, *arguments), timeout_s)


def _tests(name: str, folder: str, *options: str, timeout_s: int = 600) -> Part:
    return Part(name, (sys.executable, "-m", "pytest", folder, *options), timeout_s, folder)


LINT = [
    _tool("ruff", "ruff", "check", "--output-format=concise", "."),
    _tool("format", "ruff", "format", "--check", "."),
    _tool("mypy", "mypy", *(part for package in PACKAGES for part in ("-p", package))),
    _tool("mypy-ci", "mypy", "-p", "ci"),
    _tool("imports", "lint-imports", "--no-logo"),
    _tests("proto", "proto/tests"),
    _script("run-spec-page", "-m", "ci.spec_docs", "--check", "docs/run-spec.md"),
    _script("private-paths", "-m", "ci.private_paths"),
]

TEST = [
    *(_tests(name, f"{folder}/tests") for name, folder in UNITS.items()),
    _tests("benchmarks", "benchmarks/tests"),
    _script("simulation", "-m", "headrace_coordinator.simulation", "--seeds", "200", timeout_s=900),
    _tests("contracts", "integration_tests/contracts"),
    _tests("flows", "integration_tests/flows", timeout_s=1200),
    _tests("browser", "integration_tests/browser", timeout_s=600),
    _tests("faults", "integration_tests/faults", timeout_s=1500),
    _tests("packaging", "integration_tests/packaging", timeout_s=1200),
    _tests("compose", "integration_tests/compose", timeout_s=1200),
]

NIGHTLY = [
    _script(
        "simulation",
        "-m",
        "headrace_coordinator.simulation",
        "--first",
        "200",
        "--seeds",
        "4000",
        timeout_s=14400,
    ),
    _tests("nightly", "integration_tests", "-m", "nightly", timeout_s=14400),
]

PLANS = {"lint": LINT, "test": TEST, "nightly": NIGHTLY}
