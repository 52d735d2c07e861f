"""The tools that check deploy/: helm, promtool, Kubernetes' schemas. `ci/deploy_tools.sh` brings them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from harness.chart import CHART, helm, objects_of
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


@pytest.fixture(scope="session")
def render(tools: Path) -> Callable[..., list[dict[str, Any]]]:
    """`render("8-gpu", option, …)`: the objects that Helm makes of a file of values and options."""

    @cache
    def rendered(values: str = "", *arguments: str) -> list[dict[str, Any]]:
        file = ("--values", CHART / f"values-{values}.yaml") if values else ()
        return objects_of(helm(tools, *file, *arguments))

    return rendered
