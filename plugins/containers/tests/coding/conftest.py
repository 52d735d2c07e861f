"""Containers of the tests of coding tasks: namespaces where they can be had, which need no engine."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from headrace_containers.tasks.task import Start

sys.path.insert(0, str(Path(__file__).resolve().parent))
from namespaces import Namespaces, missing

EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "coding"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts containers without an engine."""
    if why := missing():
        pytest.skip(f"containers of namespaces: {why}")
    made = Namespaces()
    yield made.start
    made.close()


@pytest.fixture(scope="session")
def making() -> ModuleType:
    """The example that makes tasks."""
    spec = importlib.util.spec_from_file_location("make_tasks", EXAMPLES / "make_tasks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for their module there
    spec.loader.exec_module(module)
    return module
