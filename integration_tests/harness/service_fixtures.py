"""Fixtures of a service's own tests, for those of its plug-ins."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

SERVICES = Path(__file__).resolve().parents[2] / "services"


def fixtures_of(service: str) -> dict[str, Any]:
    """What `services/SERVICE/tests/conftest.py` defines; its helpers can be imported by their names from now on."""
    file = SERVICES / service / "tests" / "conftest.py"
    spec = spec_from_file_location(f"{service}_conftest", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}
