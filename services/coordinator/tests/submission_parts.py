"""Submissions without a coordinator, for tests of their rules."""

from headrace_coordinator.api.submission.submission import Submission
from headrace_coordinator.data.dataset import Dataset
from headrace_schema.problems import Impossible


async def checked(coordinator, asked):
    """What a coordinator finds wrong with a spec; empty when the run could start."""
    try:
        await coordinator.submissions.check(asked)
    except Impossible as error:
        return error.problems
    return []


def submission_of(spec, fleet, **more):
    """A spec on a fleet, its data opened."""
    try:
        data = Dataset.open(spec.data, spec.seed)
    except Impossible as error:
        data = error
    return Submission(spec, fleet, data, **more)
