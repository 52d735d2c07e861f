"""Reads tasks in SWE-bench's form: a JSON object a line with a repository at a commit, an issue, the tests that it has
to make pass, and those that have to stay so.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator

from headrace_containers.provider import DEFAULT_USER, BadPath, Container, File, Spec
from headrace_containers.tasks.task import RESTORED, BadTask, Judged, Task, digest_of

PLUGIN = "headrace_report"
_NAMED = re.compile(r"^(?:---|\+\+\+) (?:[ab]/)?([^\t\n]+)", re.MULTILINE)
_GIT = ("git", "-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null")
_GIT_S = 120.0
_MOST_OUTPUT = 16 << 20
_MOST_SAID = 4000
# Says how each test ended, behind a mark that is read from standard input before any code of the agent is imported.
REPORT = """
import os, sys

_mark, _out = sys.stdin.readline().strip(), os.dup(1)


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        os.write(_out, f"\\n{_mark} {report.outcome} {report.nodeid}\\n".encode())
"""
CONTROL = """def test_that_must_fail():
    assert False, "a run in which this one passes judges nothing"
"""


class Row(BaseModel):
    """One line. Further keys are passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    instance_id: str = Field(min_length=1)
    problem_statement: str = Field(min_length=1)
    base_commit: str = ""
    repo: str = ""
    patch: str = ""
    test_patch: str = ""
    fail_to_pass: list[str] = Field(alias="FAIL_TO_PASS", min_length=1)
    pass_to_pass: list[str] = Field(alias="PASS_TO_PASS", default_factory=list)
    image: str = Field("", validation_alias=AliasChoices("image", "image_name", "docker_image"))
    workdir: str = "/testbed"
    test_command: str = "python -m pytest"
    timeout_s: float = 600.0

    @field_validator("fail_to_pass", "pass_to_pass", mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        """Published data has these lists as JSON texts."""
        return json.loads(given) if isinstance(given, str) else given

    @property
    def wanted(self) -> list[str]:
        """All tests that have to pass."""
        return [*self.fail_to_pass, *self.pass_to_pass]


def rows(path: Path) -> Iterator[tuple[int, Row]]:
    """The lines of a file with their numbers. Raises BadTask."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"line {number} of {path.name}"
            try:
                yield number, Row.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join(map(str, first["loc"]))
                empty = key == "FAIL_TO_PASS"
                fix = (
                    "name a test that fails before the change and passes behind it" if empty else "correct it"
                )
                raise BadTask(place, f"{key or 'it'}: {first['msg']}", fix) from error


def read_task(row: Row, folder: Path) -> Task:
    """The task of a row; `folder` is where the paths of repositories begin. Raises BadTask."""
    repository = folder / row.repo if row.repo else folder
    local = bool(row.repo) and repository.exists()
    if not local and not row.image:
        where = f"there is no repository {repository}" if row.repo else "it names no repository"
        raise BadTask(row.instance_id, f"{where}, and no image has it", "give repo as a path, or image")
    if not row.image:
        raise BadTask(
            row.instance_id, "it names no image", "give image: one with what its tests need, such as pytest"
        )
    files = sorted({each.partition("::")[0] for each in row.wanted})
    restored = (*RESTORED, *files, *names_in(row.test_patch))
    return Task(
        name=row.instance_id,
        instruction=row.problem_statement,
        tests=SweTests(row),
        solution=Patch(row.patch, row.instance_id) if row.patch else None,
        digest=digest_of([("row", row.model_dump_json().encode())]),
        spec=Spec(image=row.image, workdir=row.workdir, owned=() if local else (row.workdir,)),
        restored=restored,
        archive=_archive(row, repository) if local else b"",
    )


def _archive(row: Row, repository: Path) -> bytes:
    """The repository's files at the base commit as a tar file."""
    git = (*_GIT, "-C", str(repository), "archive", "--format=tar", row.base_commit or "HEAD")
    ran = subprocess.run(git, capture_output=True, timeout=_GIT_S)
    if ran.returncode:
        why = ran.stderr.decode(errors="replace").strip()[-200:]
        fix = "correct repo and base_commit"
        raise BadTask(row.instance_id, f"{repository} has no commit {row.base_commit or 'HEAD'}: {why}", fix)
    return ran.stdout


@dataclass(frozen=True)
class Patch:
    """The change of a pull request."""

    patch: str
    task: str

    def solve(self, container: Container, user: str, workdir: str) -> str:
        """Applies it."""
        apply(container, self.patch, user, workdir, self.task)
        return "the patch was applied"


@dataclass(frozen=True)
class SweTests:
    """Tests by their names in pytest. Their files are those of the image and of `test_patch`."""

    row: Row

    def judge(self, container: Container, workdir: str) -> Judged:
        """All of FAIL_TO_PASS and PASS_TO_PASS have to pass, and a control that is put among them has to fail."""
        row, mark = self.row, secrets.token_hex(16)
        apply(container, row.test_patch, DEFAULT_USER, workdir, row.instance_id)
        control, plugins = f"test_{secrets.token_hex(4)}.py", f"/opt/{secrets.token_hex(8)}"
        container.write(
            [File(f"{plugins}/{PLUGIN}.py", REPORT.encode()), File(f"{workdir}/{control}", CONTROL.encode())],
            user=DEFAULT_USER,
        )
        files = sorted({each.partition("::")[0] for each in row.wanted})
        options = f"-p {PLUGIN} -p no:cacheprovider --rootdir=. -q --continue-on-collection-errors"
        ran = container.exec(
            ("sh", "-c", f'exec {row.test_command} {options} "$@"', "sh", control, *files),
            stdin=f"{mark}\n".encode(),
            cwd=workdir,
            env={"PYTHONPATH": plugins, "PYTHONDONTWRITEBYTECODE": "1"},
            timeout_s=row.timeout_s,
            most_bytes=_MOST_OUTPUT,
            user=DEFAULT_USER,
        )
        output = (ran.stdout + b"\n" + ran.stderr).decode(errors="replace")
        said = output.replace(mark, "").strip()[-_MOST_SAID:]
        ended = _ended(output, mark)
        if ended.get(f"{control}::test_that_must_fail") != "failed":
            return Judged(said=f"{said}\nthe control test did not fail: the run judges nothing")
        shares = {
            "fail_to_pass": _share(ended, row.fail_to_pass),
            "pass_to_pass": _share(ended, row.pass_to_pass),
        }
        return Judged({"reward": float(min(shares.values()) == 1.0), **shares}, said)


def _ended(output: str, mark: str) -> dict[str, str]:
    """How each test ended; one that failed in any part has failed."""
    found: dict[str, str] = {}
    for line in output.splitlines():
        if line.startswith(f"{mark} "):
            _, outcome, name = line.split(" ", 2)
            found[name] = outcome if found.get(name, "passed") == "passed" else found[name]
    return found


def _share(ended: Mapping[str, str], wanted: Sequence[str]) -> float:
    return sum(ended.get(each) == "passed" for each in wanted) / len(wanted) if wanted else 1.0


def names_in(patch: str) -> list[str]:
    """Files that a unified diff changes."""
    return sorted({name.strip() for name in _NAMED.findall(patch)} - {"/dev/null"})


def apply(container: Container, patch: str, user: str, workdir: str, task: str) -> None:
    """Applies a unified diff to files of a container; git runs here, so that the image needs none. Raises BadTask."""
    if not patch.strip():
        return
    names = names_in(patch)
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        before = dict(_read(container, workdir, names))
        for name, data in before.items():
            _inside(here, name, task).parent.mkdir(parents=True, exist_ok=True)
            (here / name).write_bytes(data)
        ran = subprocess.run(
            (*_GIT, "apply", "--whitespace=nowarn", "-"),
            cwd=here,
            input=patch.encode(),
            capture_output=True,
            timeout=_GIT_S,
        )
        if ran.returncode:
            why = ran.stderr.decode(errors="replace").strip()[-300:]
            raise BadTask(task, f"a patch does not apply: {why}", "make it for base_commit")
        after = {name: _inside(here, name, task) for name in names}
        made = [
            File(f"{workdir}/{name}", path.read_bytes()) for name, path in after.items() if path.is_file()
        ]
        container.write(made, user=user)
        if gone := [f"{workdir}/{name}" for name in before if not after[name].is_file()]:
            container.exec(("rm", "-f", "--", *gone), cwd="/", user=user)


def _inside(folder: Path, name: str, task: str) -> Path:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise BadTask(task, f"a patch names {name}, which is outside the repository", "correct it")
    return path


def _read(container: Container, workdir: str, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        try:
            yield name, container.read(f"{workdir}/{name}")
        except BadPath:
            continue
