"""`python integration_tests/browser/screenshots.py DIRECTORY`: pictures of the dashboard over made-up runs.

Two widths, two themes, five states: empty, live, ended, failed, many (10,000 runs; 100,000 trajectories).
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path += [str(path) for path in (HERE.parents[1] / ".envs/browser").glob("lib/python3.*/site-packages")]

from harness.crowd import Crowd, CrowdServer, write_timeline, write_trajectories  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402

FEW = [("reason-a1", "RUNNING"), ("reason-b2", "QUEUED"), ("reason-c3", "FAILED"), ("reason-d4", "SUCCEEDED")]
STATES = {
    "empty": ([], ["#/runs", "#/submit"]),
    "live": (FEW, ["#/runs/reason-a1", "#/fleet"]),
    "ended": (FEW, ["#/runs/reason-d4", "#/runs/reason-d4/timeline", "#/runs/reason-d4/proof"]),
    "failed": (FEW, ["#/runs/reason-c3", "#/compare?runs=reason-c3,reason-d4"]),
    "many": (
        [(f"reason-{n}", "SUCCEEDED") for n in range(10_000)],
        ["#/runs", "#/runs/reason-0/trajectories"],
    ),
}


def main(directory: Path) -> None:
    """Writes STATE-VIEW-WIDTH-THEME.png."""
    directory.mkdir(parents=True, exist_ok=True)
    program = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    arguments = ["--disable-gpu", "--disable-dev-shm-usage"] + ["--no-sandbox"] * (os.geteuid() == 0)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        write_trajectories(Path(folder) / "reason-0", 1563, 64, "The answer is 42.")
        write_timeline(Path(folder) / "reason-d4", 120)
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        for state, (runs, paths) in STATES.items():
            with CrowdServer(Crowd(runs), Path(folder)) as server:
                for path in paths:
                    for width in (1280, 390):
                        for theme in ("light", "dark"):
                            page = browser.new_page(
                                viewport={"width": width, "height": 900}, color_scheme=theme
                            )
                            page.goto(f"{server.url}/{path}")
                            page.wait_for_load_state("networkidle")
                            page.wait_for_timeout(300)  # the plots' first frame
                            view = path.split("?")[0].strip("#/").replace("/", "-")
                            page.screenshot(
                                path=directory / f"{state}-{view}-{width}-{theme}.png", full_page=True
                            )
                            page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
