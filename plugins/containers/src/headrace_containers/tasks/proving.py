"""Proves tasks before a run learns from them: their own solution is rewarded, and an agent that does nothing is not.

What was found is a file beside the tasks. It counts for a task as long as nothing of the task differs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace_containers.tasks.task import Judged, Start, Task
from headrace_containers.tasks.verifying import begin, judge, settled

FILE = "proofs.json"
COMMAND = "headrace tasks prove"


@dataclass(frozen=True)
class Proof:
    """What the tests of a task gave its solution and an agent that does nothing."""

    digest: str
    nothing: float
    oracle: float | None
    """None: it has no solution."""
    said: str = ""
    """What the tests said of the one that is wrong."""

    @property
    def wrong(self) -> tuple[str, str] | None:
        """What makes the task useless, and what to change; None where it is proven."""
        if self.nothing > 0 and (self.oracle is None or self.nothing >= self.oracle):
            reason = f"its tests give {self.nothing:g} to an agent that does nothing"
            return reason, "write tests that fail until the task is done"
        if self.oracle is None:
            return (
                "it has no solution that shows that its tests can pass",
                "write one, or set unproven: allow",
            )
        if self.oracle <= 0:
            said = f": {self.said}" if self.said else ""
            fix = "correct the solution, the tests, or what they are given (docs/coding-agents.md, What the tests find)"
            return f"its tests give {self.oracle:g} to its own solution{said}", fix
        return None


def proofs_file(path: Path) -> Path:
    """Where the proofs of the tasks at a path are."""
    return path / FILE if path.is_dir() else path.with_name(f"{path.name}.{FILE}")


def read_proofs(path: Path) -> dict[str, Proof]:
    """Proofs by the task's name, of the tasks at a path; none where the file is not there. Raises ValueError."""
    try:
        given = json.loads(proofs_file(path).read_text(encoding="utf-8"))
        return {name: Proof(**each) for name, each in given.items()}
    except FileNotFoundError:
        return {}
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{proofs_file(path)} is no file of proofs ({error})") from error


def write_proofs(path: Path, proofs: Mapping[str, Proof]) -> None:
    """Writes them, all or none."""
    file = proofs_file(path)
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    text = json.dumps({name: asdict(each) for name, each in sorted(proofs.items())}, indent=1)
    scratch.write_text(text + "\n", encoding="utf-8")
    scratch.replace(file)


def prove(start: Start, task: Task) -> Proof:
    """Plays a task twice: as its solution says, and without doing anything. Raises ContainerError and BadTask."""
    task = settled(start, task)
    nothing = judge(start, task, begin(start, task))
    if task.solution is None:
        return Proof(task.digest, nothing.reward, None)
    container = begin(start, task)
    try:
        said = task.solution.solve(container, task.user, task.spec.workdir)
    except BaseException:
        container.close()
        raise
    oracle = judge(start, task, container)
    return Proof(
        task.digest, nothing.reward, oracle.reward, _explained(oracle, said) if oracle.reward <= 0 else ""
    )


def _explained(oracle: Judged, said: str) -> str:
    return f"the solution said {said!r}, the tests {oracle.said!r}"[:2000]


def unproven(task: Task, proofs: Mapping[str, Proof]) -> tuple[str, str] | None:
    """Why a task may not be learned from, and what to do; None where its proof holds."""
    proof = proofs.get(task.name)
    if proof is None or proof.digest != task.digest:
        reason = (
            "nothing has shown that its tests can tell"
            if proof is None
            else "it has changed since it was proven"
        )
        return reason, f"run `{COMMAND}` on the tasks"
    return proof.wrong


def names(given: Iterable[str], most: int = 5) -> str:
    """Some names, and how many more there are."""
    listed = list(given)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
