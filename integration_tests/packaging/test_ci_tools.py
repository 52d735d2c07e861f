"""The runner of `.ci/run` and the checks of `make lint` that are ours."""

import os
import re
import signal
import subprocess
import sys
from xml.etree import ElementTree

import psutil
import pytest
import yaml
from harness.processes import ROOT
from harness.waiting import wait_for


@pytest.fixture(autouse=True)
def tools_importable(monkeypatch, repository):
    monkeypatch.syspath_prepend(str(repository))


def run_parts(*parts):
    from ci.parts import Tally, run_parts
    from ci.plan import Part

    tally = Tally()
    run_parts([Part(**{"timeout_s": 60, **fields}) for fields in parts], tally)
    return tally


def run_part(**fields):
    return run_parts(fields)


def python(code):
    return (sys.executable, "-c", code)


def test_a_part_that_hangs_is_ended_and_named():
    tally = run_part(name="sleepy", command=python("import time; time.sleep(600)"), timeout_s=1)
    assert tally.failed == 1
    assert "sleepy" in tally.lines[0] and "no end after 1 s" in tally.lines[0]


MEETING = """
import pathlib, sys, time
mine, other = map(pathlib.Path, sys.argv[1:])
mine.touch()
while not other.exists():
    time.sleep(0.05)
print("one line of", mine.name)
print("and another of", mine.name)
"""
ALONE = """
import pathlib, sys, time
inside = pathlib.Path(sys.argv[1])
inside.touch(exist_ok=False)
time.sleep(0.2)
inside.unlink()
"""

INTERRUPTED = """
import sys
from ci import parts
from ci.plan import Part
code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(600)"
sleep = (sys.executable, "-c", code, sys.argv[1])
parts.PLANS["test"] = [Part(name, sleep, 600, shares=True) for name in ("left", "right")]
sys.exit(parts.main(["test"]))
"""


def test_parts_that_share_the_machine_run_side_by_side_and_are_shown_one_after_the_other(tmp_path, capfd):
    names = [str(tmp_path / name) for name in ("left", "right")]
    meet = [(*python(MEETING), *order) for order in (names, names[::-1])]
    tally = run_parts(
        {"name": "left", "command": meet[0], "shares": True},
        {"name": "right", "command": meet[1], "shares": True},
        {"name": "broken", "command": python("print('why'); raise SystemExit(5)"), "shares": True},
    )
    assert (tally.passed, tally.failed) == (2, 1)
    assert any(line.startswith("broken") and "FAILED with status 5" in line for line in tally.lines)
    shown = capfd.readouterr().out
    for name in ("left", "right"):
        assert f"one line of {name}\nand another of {name}\n" in shown
    assert "\nwhy\n" in shown


def test_two_parts_share_a_busy_machine_at_most_and_the_others_have_it_alone(tmp_path):
    inside = str(tmp_path / "inside")
    alone = {"command": (*python(ALONE), inside)}
    waiting = {"command": python("import time; time.sleep(0.2)"), "shares": True}
    mixed = [alone, {**alone, "shares": True}, waiting, alone, alone]
    assert run_parts(*({"name": f"mixed-{n}", **part} for n, part in enumerate(mixed))).failed == 0
    third = [waiting, waiting, {**alone, "shares": True}]
    assert run_parts(*({"name": f"third-{n}", **part} for n, part in enumerate(third))).failed == 0


def test_four_parts_are_the_most_and_what_comes_after_another_waits_for_it():
    from ci.parts import _may_begin
    from ci.plan import Part

    parts = [Part(name, (), 1, shares=True) for name in ("a", "b", "c", "d", "e")]
    alone, late = Part("alone", (), 1), Part("late", (), 1, shares=True, after="a")
    assert _may_begin(alone, [], [], False)
    assert not _may_begin(alone, [], parts[:1], True) and not _may_begin(parts[0], [], [alone], True)
    assert [_may_begin(parts[4], [], parts[:count], False) for count in range(1, 5)] == [True, *[False] * 3]
    assert [_may_begin(parts[4], [], parts[:count], True) for count in range(1, 5)] == [*[True] * 3, False]
    assert not _may_begin(late, parts[:1], [], True) and not _may_begin(late, [], parts[:1], True)
    assert _may_begin(late, parts[1:], [], True)


def test_there_is_room_once_cores_and_memory_were_idle_since_the_last_part_began(monkeypatch):
    from types import SimpleNamespace

    from ci import parts

    now, idle, free = 0.0, 0.0, 2 * parts.SPARE_BYTES
    monkeypatch.setattr(parts.time, "monotonic", lambda: now)
    monkeypatch.setattr(parts, "_idle_s", lambda: idle)
    monkeypatch.setattr(parts.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    spare = parts.Spare()

    def after(seconds, idle_cores):
        nonlocal now, idle
        found = []
        for _ in range(seconds * 10):
            now, idle = now + 0.1, idle + 0.1 * idle_cores
            found.append(spare.suffices())
        return any(found)

    assert not after(60, 0.2), "busy"
    assert after(11, 1.0)
    spare.restart()
    assert not after(9, 2.0), "it has just begun"
    assert after(2, 2.0)
    free = 0
    assert not after(20, 2.0), "no memory"


def test_what_runs_is_ended_when_the_runner_is(tmp_path, repository):
    runner = subprocess.Popen(
        (*python(INTERRUPTED), str(tmp_path)), cwd=repository, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2, "both parts", 60)
        runner.terminate()
        shown, _ = runner.communicate(timeout=60)
    finally:
        runner.kill()
    assert runner.returncode == 128 + signal.SIGTERM
    for name in ("left", "right"):
        assert f"=== {name}: interrupted" in shown
    assert not [path for path in tmp_path.iterdir() if psutil.pid_exists(int(path.name))]


def test_a_part_without_tests_fails_in_ci_and_is_told_of_elsewhere(monkeypatch):
    fields = {"name": "empty", "command": python(""), "timeout_s": 60, "needs": "constraints"}
    monkeypatch.setenv("CI", "true")
    assert run_part(**fields).failed == 1
    monkeypatch.delenv("CI")
    tally = run_part(**fields)
    assert tally.failed == 0
    assert tally.uncovered == ["empty: no tests in constraints"]


def test_tests_are_counted_and_a_crash_counts_as_a_failure(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase/><testcase><failure/></testcase><testcase><error/></testcase>"
        '<testcase><skipped message="no GPU"/></testcase></testsuite></testsuites>'
    )
    from ci.reports import read_report

    found = read_report(report)
    assert (found.passed, found.failed, found.skipped) == (1, 2, ["no GPU"])
    assert run_part(name="crash", command=python("import os; os.abort()"), timeout_s=60).failed == 1


def test_paths_of_one_machine_are_found(tmp_path):
    from ci.private_paths import FOREIGN

    bad = [
        "see " + "/work" + "/main/x",
        "cp " + "/tmp" + "/x y",
        "(.." + "/" + "shared" + "/facts)",
        "`" + "shared" + "/x`",
    ]
    assert all(FOREIGN.search(text) for text in bad)
    assert not any(
        FOREIGN.search(text) for text in ["src/shared/x", "./network/x", "tmp/x", "is shared / not"]
    )


REPLACED = [
    "a gang of ranks",
    "class GangRounds:",
    "join_gang(",
    "rpc LeaveGang(",
    "CUSTODY_FULL = 3;",
    "its crew is complete",
    "lease desk",
    "await placement.let_go(trainer)",
    "a rollout lets go of its lease",
    "a paused run lets its devices go",
    "self._stand_down_rollouts()",
    "it gave up after three",
    "_give_up_at = 3",
    "from x import mistakes",
    'async def load(self): """See `Store.load`."""',
    "# PROTOCOL, section 5",
    "await together(*calls)",
]
HONEST = [
    "a gangway to the ganglion",
    "a kernel of a convolution, and Linux's kernel",
    "the members of a group whose rewards are equal",
    "port 8470 and the body of a request",
    "what belongs together (three calls)",
    "gives up to three answers",
    "a user's mistake",
    "ssl.PROTOCOL_TLS_CLIENT speaks the protocol",
    '"""See `docs/engines.md`, which says why."""',
    "parameters and meters per second",
]


def test_replaced_words_are_found_with_what_to_say_instead():
    from ci.words import findings

    for line in REPLACED:
        (found,) = findings("some/file.py", f"first\n{line}")
        assert found.startswith("some/file.py:2: ") and " → " in found
    assert [*findings("some/file.py", "\n".join(HONEST))] == []
    assert "trainer group" in next(findings("x.md", REPLACED[0]))


@pytest.mark.parametrize(
    "check",
    [("ci.private_paths",), ("ci.words",), ("ci.spec_docs", "--check", "docs/run-spec.md")],
)
def test_the_repository_passes(check, repository):
    done = subprocess.run(
        [sys.executable, "-m", *check], cwd=repository, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_every_dist_is_set_up_checked_and_tested(repository):
    from ci.plan import PACKAGES, UNITS

    folders = {
        str(path.parent.relative_to(repository))
        for path in repository.glob("[!.]*/**/pyproject.toml")
        if "examples" not in path.parts
    }
    assert set(UNITS.values()) == folders
    makefile = (repository / "Makefile").read_text()
    dists = makefile.partition("DISTS :=")[2].partition("TORCH_FROM")[0].replace("\\", "").split()
    assert set(dists) == folders
    packages = {path.name for path in repository.glob("[!.]*/**/src/headrace_*") if path.is_dir()}
    assert packages <= set(PACKAGES)


def test_the_hosted_ci_runs_parts_that_there_are(repository):
    from ci.plan import NIGHTLY

    workflows = {
        file.stem: yaml.safe_load(file.read_text())
        for file in (repository / ".github/workflows").glob("*.yml")
    }
    assert ".ci/run" in [step.get("run") for step in workflows["ci"]["jobs"]["run"]["steps"]]
    named = workflows["nightly"]["jobs"]["part"]["strategy"]["matrix"]["parts"]
    assert {name for names in named for name in names.split()} == {part.name for part in NIGHTLY}


def test_make_help_lists_every_target(repository):
    makefile = (repository / "Makefile").read_text()
    targets = makefile.partition(".PHONY: ")[2].partition("\n")[0].split()
    shown = subprocess.run(
        ["make", "help"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout
    assert [target for target in targets if f"  make {target} " not in shown] == []


def test_torch_is_pinned_once(repository):
    pins = (repository / "constraints/base.txt").read_text().splitlines()
    version = next(line for line in pins if line.startswith("torch=="))
    assert f"TORCH_VERSION := {version.removeprefix('torch==')}" in (repository / "Makefile").read_text()
    assert not [line for line in pins if "+" in line.partition("#")[0]]


LIVE = """
from time import sleep
from rich.console import Console
from rich.live import Live
from rich.text import Text
with Live(console=Console(), refresh_per_second=20) as live:
    for step in range(3):
        live.update(Text(f"step {step} <&>\\nreward 0.{step}", style="bold green"))
        sleep(1.2)
"""


def test_a_recording_draws_what_a_live_command_shows(tmp_path):
    file = tmp_path / "run.svg"
    made = subprocess.run(
        [sys.executable, "-m", "ci.recording", str(file), sys.executable, "-c", LIVE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.returncode == 0, made.stderr
    drawing = ElementTree.fromstring(file.read_text())
    frames = ["".join(each.itertext()) for each in drawing if each.get("class") == "f"]
    assert frames[-1] == "step 2 <&>reward 0.2", "a line that was drawn over is not drawn"
    assert "font-weight:700" in file.read_text()
    failed = subprocess.run(
        [sys.executable, "-m", "ci.recording", str(file), "false"], cwd=ROOT, capture_output=True, text=True
    )
    assert failed.returncode == 1 and "ended with status 1" in failed.stderr


def test_every_pin_has_hashes_of_the_same_version(repository):
    """Of another version, or without a hash, an installation by hashes would stop: `sh ci/audit.sh hashes python3`."""

    def pins(name):
        lines = (repository / "constraints" / name).read_text(encoding="utf-8").splitlines()
        found = (
            line.removesuffix(" \\").split("==") for line in lines if "==" in line and line[0] not in "# "
        )
        return {name.lower().replace("_", "-"): version for name, version in found}

    base = {name: version for name, version in pins("base.txt").items() if name != "torch"}
    assert pins("base.hashes.txt") == base
    for name in ("base", "audit"):
        file = "base.hashes.txt" if name == "base" else "audit.txt"
        blocks = (repository / "constraints" / file).read_text(encoding="utf-8").split("\n    ")
        assert all(block.startswith("--hash=sha256:") for block in blocks[1:])


DOCKER = """#!/bin/sh
test "$1 $2 $3" = "buildx imagetools inspect" || exit 9
case "$4" in redis:*) {redis};; esac
echo sha256:$(printf %s "$4" | sha256sum | cut -c1-64)
"""


@pytest.mark.parametrize(
    "redis", ["true", "echo redis:7; exit 0", "exit 1"], ids=["all", "a tag", "no registry"]
)
def test_a_release_has_every_image_by_digest_or_fails(repository, tmp_path, redis):
    docker = tmp_path / "docker"
    docker.write_text(DOCKER.format(redis=redis))
    docker.chmod(0o755)
    file = tmp_path / "images.env"
    done = subprocess.run(
        ["sh", repository / "ci/images.sh", file],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    if redis != "true":
        assert done.returncode and not file.exists()
        return
    assert done.returncode == 0, done.stderr
    found = dict(line.split("=", 1) for line in file.read_text().splitlines())
    compose = (repository / "docker-compose.yml").read_text()
    wanted = dict(re.findall(r"\$\{(HEADRACE_[A-Z]+_IMAGE):-([^}]+)\}", compose))
    assert set(found) == set(wanted) and "HEADRACE_PYTHON_IMAGE" in found
    assert all(
        re.fullmatch(re.escape(image) + "@sha256:[0-9a-f]{64}", found[name]) for name, image in wanted.items()
    )
    named = re.findall(
        r"^ARG PYTHON_IMAGE=(\S+)$", (repository / "deploy/Dockerfile").read_text(), re.MULTILINE
    )
    assert named == [wanted["HEADRACE_PYTHON_IMAGE"]], "the build takes that image, and no other"
    steps = (repository / ".github/workflows/release.yml").read_text()
    assert "sh ci/images.sh dist/images.env" in steps


def test_workflows_name_what_they_use_by_commit(repository):
    used = [
        line.split("uses:")[1].split("#")[0].strip()
        for file in (repository / ".github/workflows").glob("*.yml")
        for line in file.read_text(encoding="utf-8").splitlines()
        if "uses:" in line
    ]
    assert used and all(len(each.partition("@")[2]) == 40 for each in used), used
