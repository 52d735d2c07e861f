"""The planner's refusals: each names the stage, the number and the fix. Knows no model of costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanProblem:
    """One thing that is wrong with a workflow, a profile or a cluster: its key, the reason and the fix."""

    key: str
    problem: str
    fix: str


class PlanError(ValueError):
    """A workflow that cannot be planned. `problems` has at least one entry."""

    def __init__(self, *problems: PlanProblem) -> None:
        super().__init__("; ".join(f"{item.key}: {item.problem}; {item.fix}" for item in problems))
        self.problems = problems


def refuse(key: str, problem: str, fix: str) -> PlanError:
    """A refusal with one problem."""
    return PlanError(PlanProblem(key, problem, fix))
