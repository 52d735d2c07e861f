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
        "headrace_planner",
        "headrace_modelkit",
        "headrace_coordinator",
        "headrace_rollout",
    ),
    *("headrace_trainer", "headrace_simulator", "headrace_reward", "headrace_cli", "headrace.client"),
    "headrace_simulation",
    "headrace_fake_world",
)
UNITS = {
    "cli": "cli",
    "coordinator": "services/coordinator",
    "trainer": "services/trainer",
    "simulator": "services/simulator",
    "reward": "services/reward",
    "servicekit": "libs/servicekit",
    "rollout": "services/rollout",
    "simulation-units": "tools/simulation",
    "fake-world": "tools/fake_world",
    "modelkit": "libs/modelkit",
    "planner": "libs/planner",
    "schema": "libs/schema",
    "proto": "proto",
}
"""Suites of single dists, the longest first."""


@dataclass(frozen=True)
class Part:
    """One command; `needs` is the folder whose tests it runs, empty for anything but pytest.

    A part that `shares` the machine may run beside another one: it mostly keeps one core busy or waits, and it
    asserts no time that a busy core would spoil.
    """

    name: str
    command: tuple[str, ...]
    timeout_s: int
    needs: str = ""
    shares: bool = False

    def with_report(self, file: Path) -> list[str]:
        """The command, which also writes what it found to a JUnit file when it is pytest."""
        return [*self.command, f"--junitxml={file}"] if self.needs else [*self.command]


def _tool(name: str, program: str, *arguments: str, timeout_s: int = 300) -> Part:
    return Part(name, (str(BIN / program), *arguments), timeout_s, shares=True)


def _script(name: str, *arguments: str, timeout_s: int = 300) -> Part:
    return Part(name, (sys.executable, *arguments), timeout_s, shares=True)


def _tests(name: str, folder: str, *options: str, timeout_s: int = 600, shares: bool = False) -> Part:
    slowest = ("--durations=10", "--durations-min=5")
    return Part(name, (sys.executable, "-m", "pytest", folder, *slowest, *options), timeout_s, folder, shares)


def _simulator(name: str, *options: str, timeout_s: int) -> Part:
    """The contract suite against a real simulator, whose environment it makes first."""
    command = ("sh", "ci/test_simulators.sh", name, "--durations=10", "--durations-min=5", *options)
    return Part(f"simulator-{name}", command, timeout_s, "services/simulator/tests", shares=True)


def _megatron(timeout_s: int) -> Part:
    """The megatron backend against the fsdp one, in groups of up to four processes; makes its environment first."""
    command = ("sh", "ci/test_megatron.sh", "--durations=10", "--durations-min=5")
    return Part("megatron", command, timeout_s, "services/trainer/tests", shares=True)


LINT = [
    _tool("ruff", "ruff", "check", "--output-format=concise", "."),
    _tool("format", "ruff", "format", "--check", "."),
    _tool("mypy", "mypy", *(part for package in PACKAGES for part in ("-p", package))),
    # Each has a cache of its own: another one may be written just then.
    _tool("mypy-ci", "mypy", "--cache-dir", ".cache/mypy-ci", "-p", "ci"),
    _tool("mypy-benchmarks", "mypy", "--cache-dir", ".cache/mypy-benchmarks", "benchmarks"),
    _tool("imports", "lint-imports", "--no-logo"),
    _tests("proto", "proto/tests", shares=True),
    _script("run-spec-page", "-m", "ci.spec_docs", "--check", "docs/run-spec.md"),
    _script("reference-pages", "-m", "ci.reference_docs", "--check", "docs"),
    _script("private-paths", "-m", "ci.private_paths"),
    _script("words", "-m", "ci.words"),
]

_UNITS = [_tests(name, f"{folder}/tests", timeout_s=1200, shares=True) for name, folder in UNITS.items()]

_IMAGES = "integration_tests/compose/test_compose_images.py"

# Parts that share the machine come first, long ones before short ones, so that both lanes end together. Flows keep
# less than one core busy: services of a tiny run mostly wait for each other; containers decode with a delay; and what
# kills and stops fleets waits for silences of many heartbeats. An engine starts on one core, and a megatron group meets
# on it. Environments and images are made before the parts that use them.
TEST = [
    Part(
        "images",
        (sys.executable, "-m", "pytest", _IMAGES),
        timeout_s=1500,
        needs="integration_tests/compose",
        shares=True,
    ),
    _script("simulation", "-m", "headrace_simulation", "--seeds", "40", timeout_s=900),
    _script("simulation-stale", "-m", "headrace_simulation", "--stale", "--seeds", "30", timeout_s=900),
    Part("deploy-tools", ("sh", "ci/deploy_tools.sh", sys.executable), timeout_s=600, shares=True),
    Part("browser-environment", ("sh", "ci/browser.sh", sys.executable), timeout_s=600, shares=True),
    *_UNITS[:2],
    _tests("packaging", "integration_tests/packaging", timeout_s=1200, shares=True),
    *_UNITS[2:],
    _simulator("metaworld", timeout_s=900),
    _tests("flows", "integration_tests/flows", timeout_s=1800, shares=True),
    _tests("contracts", "integration_tests/contracts", timeout_s=900, shares=True),
    _tests("deploy", "integration_tests/deploy", shares=True),
    _tests("browser", "integration_tests/browser", timeout_s=900, shares=True),
    _tests("bad_input", "integration_tests/bad_input", timeout_s=900, shares=True),
    _tests("security", "integration_tests/security", timeout_s=600, shares=True),
    Part("vllm-environment", ("sh", "ci/engines_vllm.sh", sys.executable), timeout_s=900, shares=True),
    _tests("benchmarks", "benchmarks/tests", shares=True),
    # In an environment of its own (3.3 GB), which the part vllm-environment has made by then.
    Part("vllm", (sys.executable, "-m", "ci.engines", "vllm", "--run"), timeout_s=1200, shares=True),
    _tests("faults", "integration_tests/faults", timeout_s=1500, shares=True),
    _tests("compose", "integration_tests/compose", f"--ignore={_IMAGES}", timeout_s=1200, shares=True),
    _megatron(timeout_s=900),
]

TWO_RANKS = '{"tensor_parallel_size": 2}'
NIGHTLY = [
    _script(
        "simulation",
        "-m",
        "headrace_simulation",
        "--first",
        "40",
        "--seeds",
        "4000",
        timeout_s=14400,
    ),
    _script(
        "simulation-stale",
        *("-m", "headrace_simulation", "--stale", "--first", "30", "--seeds", "1000"),
        timeout_s=7200,
    ),
    _script(
        "simulation-meetings",
        *("-m", "headrace_simulation", "--leaders-die", "--seeds", "1000"),
        timeout_s=7200,
    ),
    _tests("nightly", "integration_tests", "cli/tests", "benchmarks/tests", "-m", "nightly", timeout_s=14400),
    _tests("nightly-trainer", "services/trainer/tests", "-m", "nightly", timeout_s=3600),
    _tests("nightly-rollout", "services/rollout/tests", "-m", "nightly", timeout_s=1800),
    _tests("nightly-reward", "services/reward/tests", "-m", "nightly", timeout_s=600),
    _tests("nightly-simulator", "services/simulator/tests", "-m", "nightly", timeout_s=600),
    _script("load", "benchmarks/load.py", "--check", timeout_s=1800),
    _tests("nightly-fake-world", "tools/fake_world/tests", "-m", "nightly", timeout_s=1800),
    _script("memory-at-size", "benchmarks/memory_at_size.py", "--check", timeout_s=3600),
    _script("vla-at-size", "benchmarks/vla_at_size.py", "--check", timeout_s=3600),
    Part("sglang", (sys.executable, "-m", "ci.engines", "sglang", "--run", "--nightly"), timeout_s=7200),
    Part(
        "vllm-two-ranks",
        (sys.executable, "-m", "ci.engines", "vllm", "--nightly", "--options", TWO_RANKS),
        timeout_s=3600,
    ),
    Part("vllm", (sys.executable, "-m", "ci.engines", "vllm", "--run", "--nightly"), timeout_s=7200),
    # In the environment that the part megatron of `test` makes; made here where it is not there.
    Part("megatron-environment", ("sh", "ci/megatron.sh", sys.executable), timeout_s=900),
    Part("megatron-experts", ("sh", "ci/test_megatron.sh", "-m", "nightly"), timeout_s=1800),
    Part(
        "megatron-run",
        (
            "env",
            "MEGATRON=1",
            sys.executable,
            "-m",
            "pytest",
            "integration_tests/engines/test_megatron_run.py",
            "integration_tests/engines/test_experts_run.py",
            "-m",
            "nightly or not nightly",
        ),
        timeout_s=2400,
        needs="integration_tests/engines",
    ),
    *(_simulator(name, "-m", "", timeout_s=3600) for name in ("metaworld", "maniskill", "libero")),
]

PLANS = {"lint": LINT, "test": TEST, "nightly": NIGHTLY}
