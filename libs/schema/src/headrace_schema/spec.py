"""The run spec: what a user submits, as typed sections that fit together.

Validates shapes and combinations that need no fleet. What only the fleet knows (which scorers, engines and devices
exist) the coordinator checks at submission.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from headrace_schema.problems import Impossible
from headrace_schema.references import refuse_literals
from headrace_schema.rules.combinations import impossible_combinations
from headrace_schema.rules.defaults import with_defaults
from headrace_schema.sections.run import RunSections


class RunSpec(RunSections):
    """One run."""

    @model_validator(mode="before")
    @classmethod
    def _left_out(cls, given: Any) -> Any:
        """Start states and rewards of an embodied or agentic run follow from its environment.

        Secrets are looked for in what the user wrote, and before any other problem is told.
        """
        refuse_literals(given)
        return with_defaults(given)

    @model_validator(mode="after")
    def _combinations(self) -> RunSpec:
        problems = list(impossible_combinations(self))
        if problems:
            raise Impossible(problems)
        return self
