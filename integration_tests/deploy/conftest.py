"""The tools that check deploy/: helm, promtool, Kubernetes' schemas. `ci/deploy_tools.sh` brings them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.processes import ROOT


@pytest.fixture(scope="session")
def tools() -> Path:
    """The folder with the tools; skips without them, and fails under CI=true."""
    made = subprocess.run(
        ["sh", "ci/deploy_tools.sh", sys.executable], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    if made.returncode:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(
            f"ci/deploy_tools.sh: {made.stderr[-500:]}"
        )
    return ROOT / ".cache" / "tools"
