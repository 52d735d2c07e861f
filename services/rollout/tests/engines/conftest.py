"""One start of each engine for all tests: it takes up to a minute."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from rig import ENGINES_HERE, Rig, make_rig  # noqa: E402


@pytest.fixture(scope="session", params=ENGINES_HERE)
def shared_rig(request, tmp_path_factory) -> Iterator[Rig]:
    torch.set_num_threads(1)
    rig = make_rig(request.param, tmp_path_factory.mktemp("engine-model"))
    yield rig
    asyncio.run(rig.engine.close())


@pytest.fixture
async def rig(in_step, shared_rig) -> Rig:
    await shared_rig.ready()
    return shared_rig
