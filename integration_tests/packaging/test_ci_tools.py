"""The runner of `.ci/run` and the checks of `make lint` that are ours."""

import subprocess
import sys

import pytest


@pytest.fixture(autouse=True)
def tools_importable(monkeypatch, repository):
    monkeypatch.syspath_prepend(str(repository))


def run_part(**fields):
    from ci.parts import Tally, run_part
    from ci.plan import Part

    tally = Tally()
    run_part(Part(**fields), tally)
    return tally


def python(code):
    return (sys.executable, "-c", code)


def test_a_part_that_hangs_is_ended_and_named():
    tally = run_part(name="sleepy", command=python("import time; time.sleep(600)"), timeout_s=1)
    assert tally.failed == 1
    assert "sleepy" in tally.lines[0] and "no end after 1 s" in tally.lines[0]


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


@pytest.mark.parametrize("check", [("ci.private_paths",), ("ci.spec_docs", "--check", "docs/run-spec.md")])
def test_the_repository_passes(check, repository):
    done = subprocess.run(
        [sys.executable, "-m", *check], cwd=repository, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_every_dist_is_set_up_checked_and_tested(repository):
    from ci.plan import PACKAGES, UNITS

    folders = {
        str(path.parent.relative_to(repository)) for path in repository.glob("[!.]*/**/pyproject.toml")
    }
    assert set(UNITS.values()) == folders
    makefile = (repository / "Makefile").read_text()
    dists = makefile.partition("DISTS :=")[2].partition("TORCH_FROM")[0].replace("\\", "").split()
    assert set(dists) == folders
    packages = {path.name for path in repository.glob("[!.]*/**/src/headrace_*") if path.is_dir()}
    assert packages <= set(PACKAGES)


def test_torch_is_pinned_once(repository):
    pins = (repository / "constraints/base.txt").read_text().splitlines()
    version = next(line for line in pins if line.startswith("torch=="))
    assert f"TORCH_VERSION := {version.removeprefix('torch==')}" in (repository / "Makefile").read_text()
    assert not [line for line in pins if "+" in line.partition("#")[0]]
