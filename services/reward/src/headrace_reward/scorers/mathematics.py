"""Mathematical equality by math-verify (https://github.com/huggingface/Math-Verify)."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from headrace_servicekit.registry import Options, plugin
from pydantic import Field, NonNegativeInt

from headrace_reward.scorers.base import Answer, ScorerError


class MathVerifyOptions(Options):
    """Options of `math_verify`."""

    strict: bool = Field(True, description="variables must match by name, and sets differ from tuples")
    float_rounding: NonNegativeInt = Field(6, description="decimals that count in a numeric comparison")


@plugin(MathVerifyOptions, packages=("math-verify", "sympy"))
class MathVerify:
    r"""1 when the answer's final expression (LaTeX, \boxed or plain) equals the reference mathematically."""

    def __init__(self, options: MathVerifyOptions) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise ScorerError(
                "name", "math_verify needs its extra: pip install 'headrace-reward[math]'"
            ) from error
        # Its own limits are SIGALRM handlers, which a loop in C ignores; the service kills the child instead.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._library = math_verify
        self._options = options
        self._gold = lru_cache(maxsize=1024)(self._parse_gold)

    def score(self, answer: Answer) -> float:
        """1 or 0; ValueError where the reference cannot be parsed."""
        gold = self._gold(answer.reference)
        if not gold:
            raise ValueError(f"the reference {answer.reference!r} holds no expression")
        given = self._library.parse(answer.completion, parsing_timeout=None)
        equal = self._library.verify(
            gold,
            given,
            strict=self._options.strict,
            float_rounding=self._options.float_rounding,
            timeout_seconds=None,
        )
        return float(equal)

    def _parse_gold(self, reference: str) -> list[Any]:
        # A reference is often bare LaTeX, which the library reads only between dollar signs.
        for text in (reference, f"${reference}$"):
            found: list[Any] = self._library.parse(text, parsing_timeout=None)
            if found:
                return found
        return []
