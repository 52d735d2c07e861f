"""How rewards become a gradient: the registry of algorithms, and the functions that they are made of.

The functions (`gae_advantages`, `ppo_terms` and others, listed in docs/algorithms.md) are those of `functional`. They
load when one is first used: asking for the names of the algorithms must not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace_trainer.algorithms._registry import ALGORITHMS, build_algorithm

__all__ = ["ALGORITHMS", "build_algorithm"]

if TYPE_CHECKING:
    from headrace_trainer.algorithms.functional import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        if not name.startswith("_"):
            functional = import_module(f"{__name__}.functional")
            if name in functional.__all__:
                return getattr(functional, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
