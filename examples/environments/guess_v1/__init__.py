"""A packaged environment of verifiers 0.4: the guessing game of examples/agents/guess.py, as its users write one.

It knows nothing of Headrace; vf-eval plays it as well.
"""

from .harness import ChatHarness
from .taskset import GuessTaskset

__all__ = ["ChatHarness", "GuessTaskset"]
