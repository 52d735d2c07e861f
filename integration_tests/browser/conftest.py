"""A real browser: Debian's Chromium, driven by Playwright of .envs/browser; `make browser` brings both.

Without them the tests are skipped, and fail under CI=true. A page that logs an error, or that the content security
policy stops, fails its test.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.crowd import CrowdServer
from harness.crowd_files import VIEWS, everything
from harness.processes import ROOT

NAMES = (os.environ.get("CHROMIUM", "chromium"), "chromium-browser", "google-chrome")
PATIENCE_MS = int(
    os.environ.get("PATIENCE_MS", 120_000)
)  # names a hang: two slow cores run a fleet meanwhile
TEST_S = 400
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
# The environment of its own has Playwright alone; everything else comes from the tests' environment.
sys.path += [str(path) for path in (ROOT / ".envs/browser").glob("lib/python3.*/site-packages")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(TEST_S))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, without a sandbox where it runs as root."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        program = None
    if program is None:
        why = "there is no Chromium, or no Playwright in .envs/browser: make browser"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    arguments = ["--disable-gpu", "--disable-dev-shm-usage"] + ["--no-sandbox"] * (os.geteuid() == 0)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages; options are Playwright's of a context. What they complain of fails the test at its end."""
    contexts, complaints = [], []

    def note(message: Any) -> None:
        # A coordinator that is away is part of some tests; Chromium reports each refused connection and answer.
        if message.type == "error" and "Failed to load resource" not in message.text:
            complaints.append(message.text)

    def make(url: str, width: int = 1280, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    yield make
    for context in contexts:
        context.close()
    assert not complaints


@pytest.fixture(scope="session")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrowdServer]:
    """Made-up runs in every state, ten thousand more, and two evaluations."""
    with everything(tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture
def opened(open_page: Callable[..., Any]) -> Callable[..., Any]:
    """Opens one of VIEWS at a server, and returns its page once it is drawn."""

    def make(server: CrowdServer, view: str, **options: Any) -> Any:
        path, mark = VIEWS[view]
        page = open_page(f"{server.url}/{path}", **options)
        page.locator(mark).first.wait_for()
        return page

    return make


@pytest.fixture
def inaccessible() -> Callable[[Any], list[tuple[str, list[str]]]]:
    """What axe-core finds gravely wrong with a page, which was opened with `bypass_csp`."""

    def check(page: Any) -> list[tuple[str, list[str]]]:
        page.add_script_tag(path=AXE)
        return [
            (each["id"], [node["html"][:200] for node in each["nodes"][:3]])
            for each in page.evaluate("async () => (await axe.run()).violations")
            if each["impact"] in ("serious", "critical")
        ]

    return check
