"""`python integration_tests/browser/screenshots.py DIRECTORY`: pictures of the dashboard over real runs.

Starts a fleet on two CPU slots and trains the tiny model on it: one run to its end, one that fails because its scorer
raises, one that is at work, one in the queue. Each view is taken in two widths and two themes, as
STATE-VIEW-WIDTH-THEME.png. What the documentation shows is taken as dashboard-VIEW.png, which `make screenshots` moves.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))
sys.path += [str(path) for path in (ROOT / ".envs/browser").glob("lib/python3.*/site-packages")]

from harness.fleet import Fleet  # noqa: E402
from harness.processes import run_python  # noqa: E402
from harness.waiting import wait_for  # noqa: E402
from headrace.client.specs import load_spec  # noqa: E402
from playwright.sync_api import Browser, sync_playwright  # noqa: E402

STEPS = 150
LIVE_AT = 45
"""Step of the run at work at which its pictures are taken."""
PATIENCE_S = 600.0
BROKEN = "def score(prompt, completion, reference, metadata):\n    raise ValueError('a scorer that breaks')\n"


class Studio:
    """A browser before a fleet, and the folder for its pictures."""

    def __init__(self, fleet: Fleet, browser: Browser, directory: Path) -> None:
        self._fleet, self._browser, self._directory = fleet, browser, directory

    def take(self, state: str, **paths: str) -> None:
        """Pictures of views, by name, in each width and theme."""
        for view, path in paths.items():
            for width in (1280, 390):
                for theme in ("light", "dark"):
                    self._take(path, f"{state}-{view}-{width}-{theme}", width, 900, theme, whole=True)

    def take_for_docs(self, view: str, path: str, height: int) -> None:
        """A picture of the top of a view."""
        self._take(path, f"dashboard-{view}", 1280, height, "light", whole=False)

    def _take(self, path: str, name: str, width: int, height: int, theme: Any, whole: bool) -> None:
        page = self._browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
        page.goto(f"{self._fleet.url}/#token={self._fleet.token}&{path}")
        page.wait_for_timeout(1500)  # a page that follows a run's events is never idle
        if "trajectories" in path:
            page.locator(".trajectory summary").first.click()
            page.locator(".trajectory .answer").first.wait_for()
        page.screenshot(path=self._directory / f"{name}.png", full_page=whole)
        page.close()


@contextmanager
def studio(directory: Path, data: Path) -> Iterator[tuple[Fleet, Studio]]:
    """A fleet and a browser, inside the block."""
    program = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    arguments = ["--disable-gpu", "--disable-dev-shm-usage"] + ["--no-sandbox"] * (os.geteuid() == 0)
    with Fleet(data, "--simulator", "0") as fleet, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        yield fleet, Studio(fleet, browser, directory)
        browser.close()


def main(directory: Path) -> None:
    """Writes all pictures."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, studio(directory, Path(folder) / "data") as (fleet, camera):
        model, broken = Path(folder) / "tiny", Path(folder) / "broken.py"
        run_python("-m", "headrace_modelkit.presets.tiny", model)
        broken.write_text(BROKEN, encoding="utf-8")

        def submit(**settings: Any) -> str:
            changes = {"model.path": str(model), "steps": STEPS, "evaluation.every": 20, **settings}
            return fleet.submit(load_spec(ROOT / "examples" / "tiny.yaml", changes)).id

        camera.take("empty", runs="/runs", submit="/submit")
        ended = submit(seed=1)
        fleet.succeed(ended, PATIENCE_S)
        failed = submit(**{"name": "broken-reward", "reward.scorers": [{"name": f"{broken}:score"}]})
        fleet.client.wait(failed, PATIENCE_S)
        live, queued = submit(), submit(**{"name": "tiny-slower", "optimizer.lr": 1e-4})
        wait_for(
            lambda: fleet.client.get(live).step >= LIVE_AT, "the run at work to be half done", PATIENCE_S
        )
        camera.take_for_docs("runs", "/runs", 450)
        camera.take_for_docs("run", f"/runs/{live}", 1365)
        camera.take_for_docs("timeline", f"/runs/{ended}/timeline", 660)
        camera.take_for_docs("compare", f"/compare?runs={ended},{live}&seeds=1", 900)
        camera.take_for_docs("trajectory", f"/runs/{ended}/trajectories?order=worst", 1130)
        camera.take("live", runs="/runs", run=f"/runs/{live}", queued=f"/runs/{queued}", fleet="/fleet")
        views = ("timeline", "trajectories", "proof", "spec")
        camera.take("ended", run=f"/runs/{ended}", **{view: f"/runs/{ended}/{view}" for view in views})
        camera.take("failed", run=f"/runs/{failed}", compare=f"/compare?runs={ended},{live}")
        fleet.end_runs()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
