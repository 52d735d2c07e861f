"""A Slurm of this machine, for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.slurm_cluster import Slurm, slurm, why_not


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes with four GPUs each, which nothing computes on; the tests of a module share them."""
    if reason := why_not():
        pytest.skip(f"skipped: {reason}")
    with slurm(tmp_path_factory.mktemp("slurm"), "n1", "n2", gpus=4) as made:
        yield made
