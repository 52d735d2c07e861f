"""The fixtures of the reward service's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "integration_tests"))

from harness.fixtures import fixtures_of

globals().update(fixtures_of("services/reward"))
