"""Makes the harness importable, gives tests with real processes time, and shows a fleet's logs when one fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from harness.engine import engine  # noqa: E402, F401  # a fixture
from harness.fleet import LIVING, Fleet  # noqa: E402
from harness.gate import Gate  # noqa: E402
from harness.processes import run_python  # noqa: E402
from harness.sharing import SharedFleet  # noqa: E402
from harness.specs import small_spec  # noqa: E402
from harness.waiting import wait_for  # noqa: E402

PATIENT = ("flows", "contracts", "bad_input", "security", "faults", "engines", "stores", "clusters")
FAILED_IN = pytest.StashKey[set[Path]]()
TEST_S = 600  # names a hang; a busy machine of two cores needs a tenth of it


def _open_folder(self: pytest.TempPathFactory, *named: Any, **how: Any) -> Path:
    """A temporary folder that is open to all: as root, users' code is another user, and writes what tests read."""
    made = _made_folder(self, *named, **how)
    made.chmod(0o777)
    return made


_made_folder, pytest.TempPathFactory.mktemp = pytest.TempPathFactory.mktemp, _open_folder  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes about a minute; runs in CI all the same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folders = {folder.name for folder in item.path.parents[:2]}
        if folders.intersection(PATIENT) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report = yield
    if report.failed:
        item.session.stash.setdefault(FAILED_IN, set()).add(item.path)
        for fleet in list(LIVING):
            if fleet.data_dir.is_dir() and (logs := fleet.logs()):
                report.sections.append((f"logs of the fleet on {fleet.data_dir}", logs))
    return report


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with random weights and a tokenizer of characters."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    run_python("-m", "headrace_modelkit.presets.tiny", directory)
    return directory


@pytest.fixture(scope="session")
def spec_of(tiny_model: Path) -> Callable[..., dict[str, Any]]:
    """Makes small run specs; see `small_spec`."""

    def make(**overrides: Any) -> dict[str, Any]:
        return small_spec(tiny_model, **overrides)

    return make


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedFleet]:
    """The fleet that modules share."""
    shared = SharedFleet(lambda: tmp_path_factory.mktemp("fleet") / "data")
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, shared_fleet: SharedFleet) -> Iterator[Fleet]:
    """A fleet that the tests of a module share, and the next module too unless one of them failed."""
    lent = shared_fleet.lend()
    yield lent
    if request.path in request.session.stash.get(FAILED_IN, set()):
        shared_fleet.close()
    else:
        lent.end_runs()


@pytest.fixture(scope="module")
def one_simulator(fleet: Fleet) -> Iterator[None]:
    """Scales the fleet that modules share to one simulator, and back."""
    fleet.client.scale("simulator", 1)
    fleet.ready("simulator-0")
    yield
    fleet.client.scale("simulator", 0)
    wait_for(
        lambda: all(item.kind != "simulator" for item in fleet.client.instances()), "the simulator to leave"
    )


@pytest.fixture
def own_fleet(tmp_path: Path) -> Callable[..., Fleet]:
    """Makes a fleet of the test's own, not yet up."""

    def make(*arguments: str, **environment: str) -> Fleet:
        return Fleet(tmp_path / "data", "--simulator", "0", *arguments, **environment)

    return make


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A scorer that the test can hold; open again when the test ends."""
    made = Gate(tmp_path / "gate")
    yield made
    made.open()
