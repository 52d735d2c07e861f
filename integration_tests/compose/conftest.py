"""One fleet in containers, which all tests share; see `harness.engine` for what they run on."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from compose.fleet import ComposeFleet, run
from harness.processes import ROOT
from harness.specs import small_spec
from headrace.client import HeadraceError

WHEELS = ROOT / ".cache" / "wheels"
TEST_S = 420


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "compose" and item.get_closest_marker("timeout") is None:
            # The first one also starts the engine.
            item.add_marker(pytest.mark.timeout(TEST_S, func_only=True))


@pytest.fixture(scope="session")
def torch_wheels() -> Path:
    """A folder with the torch wheel of this environment if it is a CPU build, else an empty one."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    torch = importlib.metadata.version("torch")
    if torch.endswith("+cpu") and not list(WHEELS.glob("torch-*.whl")):
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(WHEELS)]
        run([*download, f"torch=={torch.partition('+')[0]}"], timeout_s=300)
    return WHEELS


@pytest.fixture(scope="session")
def fleet(engine: None, torch_wheels: Path) -> Iterator[ComposeFleet]:
    """The containers that all tests share."""
    composed = ComposeFleet(torch_wheels)
    try:
        composed.compose("build", "--quiet", timeout_s=900)
        composed.up()
        yield composed
    finally:
        composed.down()


@pytest.fixture(autouse=True)
def no_run_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the runs that a failed test left: they would keep the instances from the next one."""
    composed: ComposeFleet | None = (
        request.getfixturevalue("fleet") if "fleet" in request.fixturenames else None
    )
    yield
    for left in (
        composed.client.list() if composed else ()
    ):  # asked of the client of now: `up` makes another one
        if not left.ended:
            with suppress(HeadraceError):  # it ended first
                composed.client.cancel(left.id)


@pytest.fixture
def spec_of() -> Callable[..., dict[str, Any]]:
    """Makes small run specs on the model in the volume; see `small_spec`."""

    def make(**overrides: Any) -> dict[str, Any]:
        return small_spec(Path("/models/tiny"), **overrides)

    return make
