"""A new user's first session: the commands of README, of Getting started and of Ten minutes, as they stand there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.processes import ROOT, clean_environment, free_port

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
PLACES = [
    ("README.md", "## Your own run"),
    ("docs/getting-started.md", "## A run of your own"),
    ("docs/ten-minutes.md", "## I train language models"),
    ("docs/ten-minutes.md", "## I train robots"),
    ("docs/ten-minutes.md", "## I run fleets"),
    ("docs/ten-minutes.md", "## I extend it"),
]


def blocks(page: str, section: str) -> list[tuple[str, str]]:
    """(language, text) of the code blocks of a page's section."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(section)[2]
    assert text, f"{page} has no {section}"
    return re.findall(r"^```(\w+)\n(.*?)^```", text.partition("\n## ")[0], re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path) -> Path:
    """As a clean clone: the examples, and an environment in .venv."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


@pytest.mark.parametrize(("page", "section"), PLACES)
def test_a_new_users_session(page, section, folder):
    port, run = free_port(), ""

    def say(line: str) -> str:
        line = line.replace("headrace up", f"headrace up --port {port}").replace("8470", str(port))
        done = subprocess.run(
            ["bash", "-c", f"PATH={folder}/.venv/bin:$PATH; {line.replace('RUN', run)}"],
            cwd=folder,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )
        # A machine of CI may have what doctor calls a problem.
        assert done.returncode == 0 or "doctor" in line, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    console, *others = blocks(page, section)
    *lines, down = [
        line.removeprefix("$ ") for line in console[1].replace("\\\n", "").splitlines() if line.strip()
    ]
    assert "headrace up" in "".join(lines) and "headrace down" in down
    try:
        for line in lines:
            said = say(line)
            if found := re.search(r"run ([a-z-]+-[0-9a-f]{6})", said) if not run else None:
                run = found[1]
        for language, text in others:
            if language == "python" and "headrace.client" in text:
                (folder / "session.py").write_text(text.replace("8470", str(port)))
                assert "SUCCEEDED" in say("python session.py")
            elif "curl" in text:
                assert "QUEUED" in say(text.replace("$ curl", "curl").replace("\\\n", ""))
    finally:
        say(down)
