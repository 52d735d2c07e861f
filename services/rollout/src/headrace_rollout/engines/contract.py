"""Whether what an engine plug-in builds is an engine: has what `Engine` names. Knows no model and asks for no token."""

from __future__ import annotations

from headrace_servicekit.problems import KeyProblem
from headrace_servicekit.registry import PluginError

from headrace_rollout.engines.base import Engine

OPTIONAL = frozenset({"prefills", "oldest"})
"""What an engine may leave out: its prompts and its decoding are then one, and it installs between samples only."""
CHECK = "headrace_rollout.engines.contract.check_engine"


def missing_members(engine: object) -> list[str]:
    """What an object lacks of an engine, by name."""
    wanted = {
        name for part in Engine.__mro__ for name in (*vars(part), *vars(part).get("__annotations__", ()))
    }
    public = {name for name in wanted if not name.startswith("_")}
    return sorted(name for name in public - OPTIONAL if not hasattr(engine, name))


def check_engine(engine: object) -> None:
    """For the test of a plug-in: raises AssertionError with what the engine that it builds lacks."""
    missing = missing_members(engine)
    assert not missing, f"{type(engine).__name__} lacks {', '.join(missing)} of {Engine.__module__}.Engine"


def require_engine(name: str, engine: object) -> None:
    """As a run opens: raises PluginError for an engine that lacks something, and would fail in the middle of a step."""
    if missing := missing_members(engine):
        reason = (
            f"the engine {name!r} is a {type(engine).__name__}, which has no {', '.join(missing)}: it was made for "
            "another release"
        )
        fix = (
            f"use a release of its package that fits this one, or add what {CHECK}(engine) names in its test"
        )
        raise PluginError([KeyProblem("rollout.engine", reason, fix)])
