"""How soon the dashboard shows, and how fast it follows: `python benchmarks/page.py` (`--peer PATH` of tensorboard).

A coordinator's HTTP app over made-up runs, 1,000 of them, and one with a history of 100,000 steps in a real file, read
as a coordinator reads it; Chromium without a screen opens the list of runs and that run's page. Prints one JSON line:

- `runs_paint_s`, `run_paint_s`: from the navigation to Chromium's first contentful paint; medians
- `runs_shown_s`, `run_shown_s`: until a row of the table, or a chart, stands on the page
- `curves_s`: the coordinator's own part of the run's page: thinned curves of all steps
- `runs_heap_mb`, `run_heap_mb`: JavaScript's heap with that page open (10^6 bytes)
- `events_per_s`: committed steps that the open page takes from the stream of events and draws, a second
- `peer_paint_s`, `peer_shown_s`, `peer_heap_mb`: of TensorBoard with one run of as many steps of five figures
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from statistics import median
from typing import Any

from _harness import emit, machine, say

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integration_tests"))
sys.path += [str(path) for path in (ROOT / ".envs/browser").glob("lib/python3.*/site-packages")]
RUNS, STEPS, EVENTS = 1000, 100_000, 2000
LONG = "long-1"
GOALS = {"runs_paint_s": 1.0, "run_paint_s": 1.0}
FIGURES = 5
PATIENCE_MS = 120_000
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=RUNS, help="made-up runs in the list")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the long run")
    parser.add_argument("--turns", type=int, default=5, help="times that each page is opened")
    parser.add_argument("--peer", default="", help="the tensorboard command of an environment of its own")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    say(machine())
    figures: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        program = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        arguments = ["--disable-gpu", "--disable-dev-shm-usage"] + ["--no-sandbox"] * (os.geteuid() == 0)
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        with served(Path(folder), options.runs, options.steps) as server:
            figures["curves_s"] = server.crowd.seconds_of_curves()
            say(f"curves of {options.steps:,} steps: {figures['curves_s']:.3f} s")
            views = {"runs": ("#/runs", ".runs tbody tr"), "run": (f"#/runs/{LONG}", ".chart canvas")}
            for name, (view, mark) in views.items():
                figures |= opened(browser, name, f"{server.url}/{view}", mark, options.turns)
            figures["events_per_s"] = followed(browser, server)
            say(f"events: {figures['events_per_s']:,.0f} a second")
        if options.peer:
            figures |= peer(browser, options.peer, Path(folder) / "peer", options.steps, options.turns)
        browser.close()
    missed = [name for name, goal in GOALS.items() if (figures[name] or 0.0) > goal]
    say(f"missed: {', '.join(missed)}" if missed else "all goals are met")
    say(f"at the end: {machine()}")
    emit("page", figures)


def opened(browser: Any, name: str, url: str, mark: str, turns: int) -> dict[str, float | None]:
    """Medians of the seconds to the first paint and to the mark, and the last heap in MB; a context for each turn."""
    paints, shown, heap = [], [], 0.0
    for _ in range(turns):
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        began = time.monotonic()
        page.goto(url, wait_until="commit")
        page.locator(mark).first.wait_for()
        shown.append(time.monotonic() - began)
        painted = page.evaluate(PAINT)
        assert painted is not None, f"{url} shows its mark and was never painted"
        paints.append(painted / 1000)
        heap = page.evaluate("performance.memory.usedJSHeapSize") / 1e6
        context.close()
    say(
        f"{name}: painted after {median(paints):.2f} s, shown after {median(shown):.2f} s, heap {heap:.1f} MB"
    )
    return {f"{name}_paint_s": median(paints), f"{name}_shown_s": median(shown), f"{name}_heap_mb": heap}


def served(directory: Path, runs: int, steps: int) -> Any:
    """The app over a crowd in which one run has so many steps."""
    from harness.crowd import NOW, Crowd, CrowdServer, step_view
    from headrace_coordinator.api.reading.curves import read_curves
    from headrace_coordinator.domain import events as ev
    from headrace_coordinator.domain.events import encode
    from headrace_coordinator.store.run_files import RunFiles
    from headrace_schema.resources.views import EventView

    history = directory / "runs" / LONG
    spec = {"algorithm": {"group_size": 8, "prompts_per_step": 8}}

    def committed(step: int) -> ev.StepCommitted:
        view = step_view(step).model_dump(mode="json")
        made = ev.Certificate(
            number=step + 1, parent=step, ordinal=step, digest="d", step=step - 1, attempt=1, trained=[], dropped={},
            set_digest="", tokens=4, tokens_by_version={}, max_staleness=0, log_prob_mismatch_mean=0.0,
            drop_rate_by_length={}, drop_rate_by_pass_rate={},
        )  # fmt: skip
        return ev.StepCommitted(at=NOW + step, run=LONG, certificate=made, view=view)

    submitted = ev.RunSubmitted(at=NOW, run=LONG, spec=spec, directory=str(history))
    written: list[ev.Event] = [submitted, *(committed(step) for step in range(1, steps + 1))]
    with RunFiles.opened(history, write=True, synced=False) as files:
        files.append((number, event, encode(event)) for number, event in enumerate(written, 1))
    say(f"a history of {steps:,} steps, {sum(f.stat().st_size for f in history.iterdir()) / 1e6:.0f} MB")

    class Long(Crowd):
        """Made-up runs, one of which has a history in a file and sends events while it is watched."""

        async def curves(self, run_id: str, points: int) -> Any:
            """Of the long run as a coordinator reads them."""
            if run_id != LONG:
                return await super().curves(run_id, points)
            return await asyncio.to_thread(self.read, points)

        def read(self, points: int) -> Any:
            """In a thread, as a coordinator does."""
            with RunFiles.opened(history) as files:
                return read_curves(files, points)

        async def newest_events(self, run_id: str, size: int, before: int) -> Any:
            """None before those that are sent."""
            return [], None

        async def events(self, run_id: str, after: int, *, follow: bool = True) -> AsyncIterator[EventView]:
            """Committed steps as fast as they are taken."""
            for step in range(steps + 1, steps + EVENTS + 1):
                data = {"view": step_view(step).model_dump(mode="json")}
                yield EventView(id=step + 1, type="step_committed", time=NOW, run=run_id, data=data)

        def seconds_of_curves(self) -> float:
            """Of thinning the whole history out as the page asks for it."""
            began = time.monotonic()
            self.read(500)
            return time.monotonic() - began

    others = [(f"many-{number}", "SUCCEEDED") for number in range(runs - 1)]
    return CrowdServer(Long([(LONG, "RUNNING"), *others]), directory / "runs")


def followed(browser: Any, server: Any) -> float:
    """Events a second, from the open page until its log shows the last one that is sent."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"{server.url}/#/runs/{LONG}", wait_until="commit")
    page.locator(".events li").first.wait_for()
    began = time.monotonic()
    first = int(page.locator(".events li").first.get_attribute("data-event"))
    last = first
    while True:
        now = int(page.locator(".events li").first.get_attribute("data-event"))
        if now == last and time.monotonic() - began > 1:
            break
        last, ended = now, time.monotonic()
        page.wait_for_timeout(100)
    page.close()
    return (last - first) / max(ended - began, 0.1)


def peer(browser: Any, command: str, folder: Path, steps: int, turns: int) -> dict[str, float | None]:
    """The same of TensorBoard, over one run whose figures tensorboardX writes."""
    from harness.processes import free_port
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(folder / LONG))
    for step in range(1, steps + 1):
        for number in range(FIGURES):
            writer.add_scalar(f"trainer/figure-{number}", 1 / step + number, step)
    writer.close()
    port = free_port()
    process = subprocess.Popen(
        [command, "--logdir", str(folder), "--port", str(port), "--load_fast=false"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}/#timeseries"
        patient(lambda: browser.new_page().goto(url))
        time.sleep(15)  # it reads its files in the background; what is measured is the page
        return opened(browser, "peer", url, "scalar-card svg, scalar-card canvas", turns)
    finally:
        process.terminate()
        process.wait()


def patient(act: Callable[[], Any], seconds: float = 60.0) -> None:
    """Acts until that succeeds."""
    from playwright.sync_api import Error

    deadline = time.monotonic() + seconds
    while True:
        try:
            act()
            return
        except Error:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


if __name__ == "__main__":
    main()
