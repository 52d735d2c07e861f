"""Backends by name: the folders beside this file. Imports one only when it is used."""

from __future__ import annotations

import importlib
import pkgutil
from difflib import get_close_matches
from typing import TYPE_CHECKING

from headrace_trainer.errors import invalid

if TYPE_CHECKING:
    from headrace_schema.openings import TrainerConfig

    from headrace_trainer.algorithms._base import Algorithm
    from headrace_trainer.backends._base import Backend
    from headrace_trainer.gang import Gang

PACKAGE = "headrace_trainer.backends"


def backend_names() -> list[str]:
    """Names that `build_backend` accepts; nothing is imported to list them."""
    path = importlib.import_module(PACKAGE).__path__
    return sorted(module.name for module in pkgutil.iter_modules(path) if module.name[0] != "_")


def check_backend(name: str) -> None:
    """Raises Refusal INVALID with the nearest name when there is no such backend."""
    names = backend_names()
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise invalid(f"trainer.backend: no backend {name!r}; there are {', '.join(names)}{hint}")


def build_backend(config: TrainerConfig, algorithm: Algorithm, gang: Gang) -> Backend:
    """The backend that `config.trainer.backend` names, without weights yet."""
    check_backend(config.trainer.backend)
    module = importlib.import_module(f"{PACKAGE}.{config.trainer.backend}")
    backend: Backend = module.build(config, algorithm, gang)
    return backend
