"""The simulator's own rig: a real instance with real children, and short ways to speak to it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_RIG = Path(__file__).resolve().parents[3] / "services/simulator/tests/conftest.py"
_spec = importlib.util.spec_from_file_location("simulator_tests_rig", _RIG)
assert _spec is not None and _spec.loader is not None
rig = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = rig
_spec.loader.exec_module(rig)
sys.path.insert(0, str(Path(__file__).parent))
instance, locally, simulator, tmp_path = rig.instance, rig.locally, rig.simulator, rig.tmp_path


@pytest.fixture
def reset_timeout_s() -> float:
    """Browsers and libraries take longer to begin than the simulator's own environments."""
    return 30.0
