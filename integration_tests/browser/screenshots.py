"""`python integration_tests/browser/screenshots.py DIRECTORY`: pictures of the dashboard over made-up runs.

Two widths, two themes, five states: empty, live, ended, failed, many (10,000 runs; 100,000 trajectories). Prints what
the pages of the last state weigh and how long they take, one JSON line a page.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path += [str(path) for path in (HERE.parents[1] / ".envs/browser").glob("lib/python3.*/site-packages")]

from harness.crowd import Crowd, CrowdServer, write_timeline, write_trajectories  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402

FEW = [("reason-a1", "RUNNING"), ("reason-b2", "QUEUED"), ("reason-c3", "FAILED"), ("reason-d4", "SUCCEEDED")]
NEXT = {"#/runs": "Older", "#/runs/reason-0/trajectories": "Next"}
"""The button of a long list that shows its next page."""
STATES = {
    "empty": ([], ["#/runs", "#/submit"]),
    "live": (FEW, ["#/runs", "#/runs/reason-a1", "#/fleet"]),
    "ended": (FEW, ["#/runs/reason-d4", "#/runs/reason-d4/timeline", "#/runs/reason-d4/proof"]),
    "failed": (FEW, ["#/runs/reason-c3", "#/compare?runs=reason-c3,reason-d4"]),
    "many": (
        [(f"reason-{n}", "SUCCEEDED") for n in range(10_000)],
        ["#/runs", "#/runs/reason-0/trajectories"],
    ),
}


def weigh(page: Page, path: str) -> dict[str, float | str]:
    """Milliseconds to the first paint and to the next page of a list, bytes of the dashboard's files, DOM nodes."""
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    files = page.evaluate("performance.getEntriesByType('resource').map((e) => [e.name, e.decodedBodySize])")
    began = time.monotonic()
    page.get_by_role("button", name=NEXT[path]).click()
    page.get_by_text("page 2").wait_for()
    return {
        "page": path,
        "first_paint_ms": round(paint),
        "next_page_ms": round(1000 * (time.monotonic() - began)),
        "bytes": sum(size for name, size in files if "/v1/" not in name),
        "dom_nodes": page.evaluate("document.querySelectorAll('*').length"),
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
                            if path in NEXT and state == "many" and (width, theme) == (1280, "light"):
                                print(json.dumps(weigh(page, path)), flush=True)
                            page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
