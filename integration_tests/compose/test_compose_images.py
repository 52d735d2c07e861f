"""The images are built: a part of its own in CI, beside others, so that the tests of containers find them made."""

from __future__ import annotations

from pathlib import Path

import pytest
from compose.fleet import ComposeFleet


@pytest.mark.timeout(1500)
def test_the_images_are_built(engine: None, torch_wheels: Path) -> None:
    ComposeFleet(torch_wheels).compose("build", "--quiet", timeout_s=1200)
