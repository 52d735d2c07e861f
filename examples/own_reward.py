"""A reward of your own: one function, run in a child process with a time limit."""

from collections.abc import Mapping


def score(prompt: str, completion: str, reference: str, metadata: Mapping[str, object]) -> dict[str, float]:
    """The share of right digits, and a bonus for stopping in time. Parts are added up and shown apart."""
    right = sum(given == wanted for given, wanted in zip(completion, reference, strict=False))
    return {"digits": right / len(reference), "stopped": 0.2 * (len(completion) == len(reference))}
