"""Whether an embodied spec's tasks are ones that the fleet's simulators have. Knows no environment.

What is behind the "/" of SUITE/TASK, a version, a user's own file and a name behind a module's are known to the backend
alone: it says what is wrong with them when the run opens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from headrace_schema.problems import choose, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.spec import RunSpec
from headrace_servicekit.registry import read_capabilities

_VERSION = re.compile(r"-v\d+$")


def task_problems(spec: RunSpec, listed: Iterable[str]) -> Iterator[KeyProblemView]:
    """Tasks that no simulator has. `listed`: what simulators registered, "BACKEND=[names]"; none: nothing is said."""
    environment = spec.environment
    if environment is None:
        return
    known: set[str] = set()
    for text in listed:
        known |= {*map(str, read_capabilities([text]).get(environment.backend, ()))}
    stems = {_stem(name) for name in known}
    for index, task in enumerate(environment.tasks if known else ()):
        name = environment.variant_of(task)[0]
        if ":" in name or _stem(name) in stems:
            continue
        reason = f"no simulator instance has the task {name!r} of {environment.backend}"
        yield problem(f"environment.tasks[{index}]", reason, choose(name, known))


def _stem(name: str) -> str:
    return _VERSION.sub("", name.partition("/")[0])
