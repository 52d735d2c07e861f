"""Which parts there are and how long each may take. Budgets are for two slow cores: they name a hang, no more."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
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
    "headrace_robots",
    "headrace_environments",
    "headrace_megatron",
    "headrace_sglang",
    "headrace_containers",
    "headrace_search",
    "headrace_clusters",
    "headrace_simulation",
    "headrace_fake_world",
)
UNITS = {
    "cli": "cli",
    "coordinator": "services/coordinator",
    "trainer": "services/trainer",
    "simulator": "services/simulator",
    "robots": "plugins/robots",
    "environments": "plugins/environments",
    "megatron-refusals": "plugins/megatron",
    "sglang-parts": "plugins/sglang",
    "containers-parts": "plugins/containers",
    "search": "plugins/search",
    "clusters-parts": "plugins/clusters",
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
"""Suites of single dists."""


@dataclass(frozen=True)
class Part:
    """One command; `needs` is the folder whose tests it runs, empty for anything but pytest.

    A part that `shares` the machine may run beside others: it mostly keeps one core busy or waits, and it asserts no
    time that a busy core would spoil. One that comes `after` another uses what that makes. One with `inputs`, git's
    path specifications of what it tries and of the contract that this keeps, is left out of `make test` while they are
    as they were when it passed.
    """

    name: str
    command: tuple[str, ...]
    timeout_s: int
    needs: str = ""
    shares: bool = False
    inputs: tuple[str, ...] = ()
    after: str = ""

    def with_report(self, file: Path) -> list[str]:
        """The command, which also writes what it found to a JUnit file when it is pytest."""
        return [*self.command, f"--junitxml={file}"] if self.needs else [*self.command]


_ENGINES, _BACKENDS = (
    "services/rollout/src/headrace_rollout/engines",
    "services/trainer/src/headrace_trainer/backends",
)
_WORLDS, _COORDINATOR = (
    "services/simulator/src/headrace_simulator",
    "services/coordinator/src/headrace_coordinator",
)
_VLLM = (
    *(f":(glob){_ENGINES}/*.py", f"{_ENGINES}/hosted", f"{_ENGINES}/vllm", "services/rollout/tests/engines"),
    *(
        "integration_tests/engines/test_engine_run.py",
        "constraints/vllm-cpu.txt",
        ":(glob)ci/engines/*.py",
    ),
)
_MEGATRON = (
    *(f":(glob){_BACKENDS}/*.py", f"{_BACKENDS}/shared", "plugins/megatron", "constraints/megatron.txt"),
    ":(glob)ci/*megatron.sh",
)
_REAL = ("metaworld", "maniskill", "libero", "dm_control", "pybullet", "robotics", "playground")
_SIMULATORS = (
    *(
        f":(glob){_WORLDS}/*.py",
        f":(glob){_WORLDS}/backends/*.py",
        "plugins/robots/src/headrace_robots/simulator",
    ),
    *("plugins/robots/pyproject.toml", "plugins/robots/tests/simulator", ":(glob)ci/*simulators.sh"),
    *(f"services/simulator/tests/{name}.py" for name in ("contract_cases", "test_simulator_contract")),
    "services/simulator/tests/test_simulator_knobs.py",
    *(f"constraints/{name}.txt" for name in _REAL),
    "examples/embodied/playground.py",
)
_OTHERS = (
    *("plugins/environments", "examples/environments", "integration_tests/engines/test_environments_run.py"),
    *(f":(glob){_WORLDS}/*.py", f":(glob){_WORLDS}/backends/*.py", ":(glob)ci/*simulators.sh"),
    *(f"constraints/{name}.txt" for name in ("verifiers", "web", "openenv", "nemo-gym")),
)
_TINKER = (
    *(f"{_COORDINATOR}/{name}" for name in ("api/http/tinker", "sessions", "run/asked")),
    *("proto/src/headrace/tinker", "libs/schema/src/headrace_schema/sessions.py"),
    *("integration_tests/engines/test_tinker_run.py", "integration_tests/engines/tinker_loop.py"),
    *("constraints/tinker.txt", ":(glob)ci/*tinker.sh"),
)
_BROWSER = (
    *("integration_tests/browser", f"{_COORDINATOR}/dashboard", "docs/http-api.md"),
    *("constraints/browser.txt", "ci/browser.sh"),
)
"""What each environment's tests try, and the contract: of a dashboard it is the page of the HTTP API."""


def tool(name: str, program: str, *arguments: str, timeout_s: int = 300) -> Part:
    """A part that is a program of .venv."""
    return Part(name, (str(BIN / program), *arguments), timeout_s, shares=True)


def script(name: str, *arguments: str, timeout_s: int = 300) -> Part:
    """A part that is Python of .venv with arguments."""
    return Part(name, (sys.executable, *arguments), timeout_s, shares=True)


def _tests(
    name: str, folder: str, *options: str, timeout_s: int = 600, shares: bool = False, after: str = ""
) -> Part:
    slowest = ("--durations=10", "--durations-min=5")
    command = (sys.executable, "-m", "pytest", folder, *slowest, *options)
    return Part(name, command, timeout_s, folder, shares, after=after)


def _nightly(name: str, folder: str, *options: str, timeout_s: int) -> Part:
    """The tests of a folder that take too long for every change."""
    return _tests(f"nightly-{name}", folder, *options, "-m", "nightly", timeout_s=timeout_s)


def _simulator(name: str, *options: str, timeout_s: int) -> Part:
    """The contract suite against a real simulator, whose environment it makes first."""
    command = ("sh", "ci/test_simulators.sh", name, "--durations=10", "--durations-min=5", *options)
    return Part(f"simulator-{name}", command, timeout_s, "services/simulator/tests", True, inputs=_SIMULATORS)


def _others(name: str, *options: str, timeout_s: int) -> Part:
    """The tests of environments of others in an environment of their own, which it makes first."""
    command = ("sh", "ci/test_simulators.sh", name, "--durations=10", "--durations-min=5", *options)
    return Part(f"simulator-{name}", command, timeout_s, "integration_tests/engines", True, _OTHERS)


def _megatron(*options: str, timeout_s: int) -> Part:
    """The megatron backend against the fsdp one, in groups of up to four processes; makes its environment first."""
    command = ("sh", "ci/test_megatron.sh", "--durations=10", "--durations-min=5", *options)
    return Part("megatron", command, timeout_s, "plugins/megatron/tests", True, inputs=_MEGATRON)


def _tinker(*options: str, timeout_s: int) -> Part:
    """Tinker's own client and recipes against a fleet; makes their environment first."""
    command = ("sh", "ci/test_tinker.sh", "--durations=10", "--durations-min=5", *options)
    return Part("tinker", command, timeout_s, "integration_tests/engines", True, _TINKER)


_MYPY = shlex.quote(str(BIN / "mypy"))
LINT = [
    tool("ruff", "ruff", "check", "--output-format=concise", "."),
    tool("format", "ruff", "format", "--check", "."),
    # One after the other, on one cache: each alone would read the types of all packages again.
    Part(
        "mypy",
        ("sh", "-c", f"{_MYPY} {' '.join(f'-p {each}' for each in (*PACKAGES, 'ci'))} && {_MYPY} benchmarks"),
        600,
        shares=True,
    ),
    tool("imports", "lint-imports", "--no-logo"),
    _tests("proto", "proto/tests", shares=True),
    script("run-spec-page", "-m", "ci.spec_docs", "--check", "docs/run-spec.md"),
    script("reference-pages", "-m", "ci.reference_docs", "--check", "docs"),
    script("models-page", "-m", "ci.model_docs", "--check", "docs/models.md"),
    script("private-paths", "-m", "ci.private_paths"),
    script("words", "-m", "ci.words"),
    script("ceilings", "-m", "ci.ceilings"),
]

_UNITS = [_tests(name, f"{folder}/tests", timeout_s=1200, shares=True) for name, folder in UNITS.items()]

_IMAGES = "integration_tests/compose/test_compose_images.py"

_BROWSER_ENVIRONMENT = Part(
    "browser-environment", ("sh", "ci/browser.sh", sys.executable), 600, "", True, _BROWSER
)
_BROWSER_TESTS = replace(
    _tests("browser", "integration_tests/browser", timeout_s=900, shares=True, after="browser-environment"),
    inputs=_BROWSER,
)
_MAKE_ENGINE = (sys.executable, "-m", "ci.engines.environments")
_VLLM_ENVIRONMENT = Part("vllm-environment", (*_MAKE_ENGINE, "vllm", "--device", "cpu"), 900, "", True, _VLLM)
_RESOLUTION = Part(
    "engine-resolution",
    (sys.executable, "-m", "ci.engines.resolution"),
    900,
    shares=True,
    inputs=(
        ":(glob)constraints/*-cuda.txt",
        "ci/engines/resolution.py",
        "deploy/requirements.py",
        *(f"{dist}/pyproject.toml" for dist in ("proto", "libs/schema", "libs/servicekit", "libs/modelkit")),
        *(f"{dist}/pyproject.toml" for dist in ("plugins/robots", "plugins/sglang")),
        *(f"{dist}/pyproject.toml" for dist in ("services/rollout", "services/trainer")),
    ),
)
"""Asks the package index. What `make test` always asks is the record of it: integration_tests/packaging."""

_ORDER = (
    *("images", "flows", "deploy-tools", "simulator", "trainer", "coordinator"),
    *("browser-environment", "vllm-environment", "engine-resolution"),
    *("compose", "cli", "vllm", "browser", "contracts", "faults", "reward", "robots", "rollout", "security"),
    *("megatron", "packaging", "bad_input", "simulator-verifiers", "benchmarks", "servicekit", "clusters"),
)
"""Long parts begin before short ones, so that all lanes end together. What is not named follows."""
_TEST = [
    Part(
        "images",
        (sys.executable, "-m", "pytest", _IMAGES),
        timeout_s=1500,
        needs="integration_tests/compose",
        shares=True,
    ),
    script("simulation", "-m", "headrace_simulation", "--seeds", "40", timeout_s=900),
    script("simulation-stale", "-m", "headrace_simulation", "--stale", "--seeds", "30", timeout_s=900),
    script("recorded", "-m", "ci.recorded", "--check", "--seeds", "20", "--runs", "tiny", timeout_s=600),
    Part("deploy-tools", ("sh", "ci/deploy_tools.sh", sys.executable), timeout_s=600, shares=True),
    _BROWSER_ENVIRONMENT,
    _RESOLUTION,
    _tests("packaging", "integration_tests/packaging", timeout_s=1200, shares=True),
    *_UNITS,
    _simulator("metaworld", timeout_s=900),
    *(_others(name, timeout_s=900) for name in ("verifiers", "web")),
    _tinker(timeout_s=1200),
    _tests("flows", "integration_tests/flows", timeout_s=1800, shares=True),
    _tests("contracts", "integration_tests/contracts", timeout_s=900, shares=True),
    _tests("deploy", "integration_tests/deploy", shares=True),
    _tests("stores", "integration_tests/stores", shares=True),
    _BROWSER_TESTS,
    _tests("bad_input", "integration_tests/bad_input", timeout_s=900, shares=True),
    _tests("security", "integration_tests/security", timeout_s=600, shares=True),
    _tests("clusters", "integration_tests/clusters", timeout_s=600, shares=True),
    _VLLM_ENVIRONMENT,
    _tests("benchmarks", "benchmarks/tests", shares=True),
    # In an environment of its own (3.3 GB).
    Part(
        "vllm",
        (sys.executable, "-m", "ci.engines", "vllm", "--run"),
        1200,
        shares=True,
        inputs=_VLLM,
        after="vllm-environment",
    ),
    _tests("faults", "integration_tests/faults", timeout_s=1500, shares=True),
    _tests(
        "compose",
        "integration_tests/compose",
        "integration_tests/containers",
        f"--ignore={_IMAGES}",
        timeout_s=1200,
        shares=True,
        after="images",
    ),
    _megatron(timeout_s=900),
]
TEST = sorted(_TEST, key=lambda part: _ORDER.index(part.name) if part.name in _ORDER else len(_ORDER))

_ENGINE = (sys.executable, "-m", "ci.engines")
_IGNORED = tuple(f"--ignore=integration_tests/{name}" for name in ("flows", "faults", "clusters"))
TWO_RANKS = '{"tensor_parallel_size": 2}'
NIGHTLY = [
    script("simulation", "-m", "headrace_simulation", "--seeds", "4000", timeout_s=14400),
    script("simulation-stale", "-m", "headrace_simulation", "--stale", "--seeds", "1000", timeout_s=7200),
    script(
        "simulation-meetings", "-m", "headrace_simulation", "--leaders-die", "--seeds", "1000", timeout_s=7200
    ),
    script(
        "simulation-containers", "-m", "headrace_simulation", "--containers", "--seeds", "600", timeout_s=7200
    ),
    script("recorded", "-m", "ci.recorded", "--check", timeout_s=3600),
    script("walks", "-m", "ci.ceilings", "--walks", timeout_s=1200),
    _nightly("flows", "integration_tests/flows", timeout_s=7200),
    _nightly("faults", "integration_tests/faults", timeout_s=14400),
    _nightly("others", "integration_tests", *_IGNORED, "cli/tests", "benchmarks/tests", timeout_s=14400),
    _nightly("trainer", "services/trainer/tests", timeout_s=3600),
    _nightly("rollout", "services/rollout/tests", timeout_s=1800),
    _nightly("modelkit", "libs/modelkit/tests", timeout_s=900),
    _nightly("robots", "plugins/robots/tests", timeout_s=1800),
    _nightly("reward", "services/reward/tests", timeout_s=600),
    _nightly("simulator", "services/simulator/tests", timeout_s=600),
    _nightly("fake-world", "tools/fake_world/tests", timeout_s=1800),
    script("soak", "benchmarks/soak.py", "--check", timeout_s=9000),
    Part("audit", ("sh", "ci/audit.sh", "all", sys.executable), 900, shares=True),
    script("load", "benchmarks/load.py", "--check", timeout_s=1800),
    script("memory-at-size", "benchmarks/memory_at_size.py", "--check", timeout_s=3600),
    script("weights-at-size", "benchmarks/weights_at_size.py", "--check", timeout_s=600),
    script("vla-at-size", "benchmarks/vla_at_size.py", "--check", timeout_s=3600),
    Part("sglang", (*_ENGINE, "sglang", "--run", "--nightly"), timeout_s=7200),
    Part("vllm-two-ranks", (*_ENGINE, "vllm", "--nightly", "--options", TWO_RANKS), timeout_s=3600),
    Part("vllm", (*_ENGINE, "vllm", "--run", "--nightly"), timeout_s=7200, inputs=_VLLM),
    _megatron("-m", "", timeout_s=3600),
    Part(
        "megatron-run",
        (
            *("env", "MEGATRON=1", sys.executable, "-m", "pytest", "-m", ""),
            *(f"integration_tests/engines/test_{name}_run.py" for name in ("megatron", "experts")),
        ),
        timeout_s=2400,
        needs="integration_tests/engines",
    ),
    *(
        Part(
            f"simulator-{name}",
            (
                *("env", f"BACKEND_UNDER_TEST={name}", sys.executable, "-m", "pytest", "-m", ""),
                "services/simulator/tests/test_simulator_contract.py",
            ),
            timeout_s=900,
        )
        for name in ("robot", "world")
    ),
    *(_simulator(name, "-m", "", timeout_s=3600) for name in _REAL),
    _RESOLUTION,
    *(_others(name, "-m", "", timeout_s=3600) for name in ("verifiers", "web", "openenv", "nemo-gym")),
    _tinker("-m", "", timeout_s=3600),
    Part("float8", ("sh", "ci/test_float8.sh", "-m", ""), 900, "services/trainer/tests", True),
    Part("lerobot", ("sh", "ci/lerobot.sh"), 2400, "plugins/robots/tests"),
    *(_nightly(name, f"plugins/{name}/tests", timeout_s=1800) for name in ("environments", "containers")),
    _nightly("clusters", "integration_tests/clusters", "plugins/clusters/tests", timeout_s=7200),
    _BROWSER_ENVIRONMENT,
    _BROWSER_TESTS,
]

PLANS = {"lint": LINT, "test": TEST, "nightly": NIGHTLY}
