"""Fixtures of a dist's own tests, for those of its plug-ins."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def fixtures_of(folder: str) -> dict[str, Any]:
    """What `FOLDER/tests/conftest.py` defines; its helpers can be imported by their names from now on."""
    spec = spec_from_file_location(
        f"{folder.replace('/', '_')}_conftest", ROOT / folder / "tests" / "conftest.py"
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}
