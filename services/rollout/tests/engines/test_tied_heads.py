"""A model whose output head is its embedding: an engine that keeps a copy of the head must make it anew."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from rig import ENGINES_HERE, START_S, Rig, make_rig

pytestmark = pytest.mark.timeout(START_S)


QUICK = ("transformers", "plain")  # others take long to start


@pytest.fixture(
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in ENGINES_HERE]
)
def tied(request, tmp_path) -> Iterator[Rig]:
    rig = make_rig(request.param, tmp_path, tie_word_embeddings=True)
    yield rig
    asyncio.run(rig.engine.close())


async def test_a_head_that_is_tied_to_the_embedding_is_of_the_installed_version(tied):
    names = {entry.name for entry in tied.weights(tied.model_a).entries}
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    for model in (tied.model_a, tied.model_b):
        await tied.install(model)
        await tied.serves(model)
