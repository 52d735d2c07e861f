"""Data of a store, fetched for a run before it is opened. Knows no source."""

from __future__ import annotations

from headrace_schema.problems import Impossible, problem
from headrace_schema.spec import RunSpec
from headrace_servicekit.stores.problems import StoreProblem
from headrace_servicekit.stores.process import localized_aside

FETCH_S = 3600.0
"""Longest time to fetch one path. What was fetched by then stays, for the next try."""


async def with_local_data(spec: RunSpec) -> RunSpec:
    """The spec with local paths in place of the addresses in `data` and `evaluation`. Raises `Impossible`."""
    try:
        data = await localized_aside(spec.data, "data", FETCH_S)
        evaluation = await localized_aside(spec.evaluation, "evaluation", FETCH_S)
    except StoreProblem as error:
        raise Impossible([problem(error.key, error.reason, error.fix)]) from error
    return spec.model_copy(update={"data": data, "evaluation": evaluation})
