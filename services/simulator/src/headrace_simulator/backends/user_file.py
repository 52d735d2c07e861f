"""A user's own environment by PATH.py:NAME: the file is imported, and the name is a function or a class in it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace_simulator.backends.base import BackendError

_FIELD = "environment.name"


def is_user_environment(name: str) -> bool:
    """Whether a name means a file rather than a registered environment."""
    return ".py:" in name or name.endswith(".py")


def load_factory(name: str, example: str = "make_env") -> Callable[..., Any]:
    """Imports the file and takes the function or class; whatever the file raises goes through.

    `example` is what a name of another kind is told to be like.

    Raises:
        BackendError: the file, or the name in it, is missing.
    """
    path_text, _, function_name = name.rpartition(":")
    if not path_text or not function_name.isidentifier():
        raise BackendError(_FIELD, f"{name}: name the function too, as {name.split(':')[0]}:{example}")
    path = Path(path_text).absolute()  # a link, as a cache of files has them, keeps its own name
    if not path.is_file():
        raise BackendError(_FIELD, f"{name}: no such file {path}; paths start where the service does")
    module_name = f"headrace_user_environment_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise BackendError(_FIELD, f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Its neighbours are importable, as when the file is run as a script.
    sys.path.insert(0, str(path.parent))
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    factory: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(factory):
        raise BackendError(_FIELD, f"{path}: there is no function {function_name!r}")
    return factory
