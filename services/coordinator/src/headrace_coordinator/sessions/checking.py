"""What is wrong with a call by itself, whatever the model. Its number is used up all the same."""

from __future__ import annotations

from collections.abc import Iterator

from headrace_schema.sessions import LOSS_OPTIONS, Failure, Forward, ForwardBackward, Operation


def problem_of(operation: Operation) -> Failure | None:
    """Why a call cannot be executed; None where its parts fit each other."""
    if not isinstance(operation, Forward | ForwardBackward):
        return None
    for key, reason, fix in _problems(operation):
        return Failure(category="user", message=f"{reason}; {fix}", key=key)
    return None


def _problems(call: Forward | ForwardBackward) -> Iterator[tuple[str, str, str]]:
    known = LOSS_OPTIONS[call.loss]
    for name in sorted(call.options.keys() - known.keys()):
        fix = f"use {', '.join(known)}" if known else "leave it out"
        yield f"options.{name}", f"{call.loss} has no such option", fix
    needed = () if call.loss == "cross_entropy" else ("advantages", "log_probs")
    for place, each in enumerate(call.data):
        where, count = f"data[{place}]", len(each.targets)
        if not count or count % len(each.tokens):
            reason = f"{count} targets of {len(each.tokens)} tokens"
            yield f"{where}.targets", reason, "give one, or as many, for each token"
        for name in ("weights", "advantages", "log_probs"):
            values = getattr(each, name)
            if values and len(values) != count:
                yield (
                    f"{where}.{name}",
                    f"{len(values)} values of {count} targets",
                    "give one for each target",
                )
            if not values and name in needed:
                yield f"{where}.{name}", f"{call.loss} needs them", "give one for each target"
