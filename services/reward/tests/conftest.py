"""A real reward instance on a free port, with real children, and short ways to speak to it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from headrace.common.v1 import common_pb2
from headrace.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace_reward.__main__ import mount
from headrace_servicekit.instance import Instance, InstanceConfig
from headrace_servicekit.rpc.client import dial

sys.path.insert(0, str(Path(__file__).resolve().parent))


@dataclass
class RewardClient:
    """Speaks to one instance about one run."""

    stub: reward_pb2_grpc.RewardServiceStub
    run: str = "runs/test"
    ordinals: count = field(default_factory=count)

    def header(self, epoch: int = 1) -> common_pb2.CommandHeader:
        return common_pb2.CommandHeader(request_id="r", run=self.run, coordinator_epoch=epoch)

    async def open(self, *scorers, **section) -> str:
        """Opens the run; a scorer is a name, or (name, weight), or a mapping."""
        entries = [entry(each) for each in scorers]
        config = json.dumps({"scorers": entries, **section})
        request = reward_pb2.OpenRunRequest(header=self.header(), config_json=config)
        return (await self.stub.OpenRun(request)).scorer_digest

    async def close(self) -> None:
        await self.stub.CloseRun(reward_pb2.CloseRunRequest(header=self.header()))

    async def score(self, *items: reward_pb2.ScoreItem) -> list[reward_pb2.ScoreResult]:
        """Scores items in one message; results in the order of the items."""

        async def requests():
            yield reward_pb2.ScoreRequest(header=self.header(), items=items)

        found = {}
        async for response in self.stub.Score(requests(), timeout=60):
            for result in response.results:
                found[key(result)] = result
        return [found[key(item)] for item in items]

    async def answers(self, *completions: str, **fields) -> list[reward_pb2.ScoreResult]:
        """Scores answers to fresh slots."""
        return await self.score(*(self.item(text, **fields) for text in completions))

    def item(self, completion: str, *, metadata=None, ordinal=None, **fields) -> reward_pb2.ScoreItem:
        sample = common_pb2.SlotKey(prompt_ordinal=next(self.ordinals) if ordinal is None else ordinal)
        return reward_pb2.ScoreItem(
            sample=sample,
            attempt=fields.pop("attempt", 1),
            completion=completion,
            metadata_json=json.dumps(metadata) if metadata is not None else "",
            **fields,
        )


def key(message) -> tuple[int, int, int, bool, str]:
    return (
        message.sample.prompt_ordinal,
        message.sample.sample_index,
        message.attempt,
        message.evaluation,
        message.stage,
    )


def entry(scorer) -> dict:
    if isinstance(scorer, dict):
        return scorer
    name, weight = scorer if isinstance(scorer, tuple) else (scorer, 1.0)
    return {"name": name, "weight": weight}


@pytest.fixture
async def instance(tmp_path, monkeypatch):
    """A stand-alone instance with two children, started in the test's own directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_REWARD_CHILDREN", "2")
    made = Instance(InstanceConfig(kind="reward", shm_dir=tmp_path / "shm", data_dir=tmp_path / "data"))
    close = await mount(made)
    await made.start()
    yield made
    await close()
    await made.stop()


@pytest.fixture
async def reward(instance):
    channel = dial(instance.address, token=None)
    yield RewardClient(reward_pb2_grpc.RewardServiceStub(channel))
    await channel.close()


@pytest.fixture
def shared():
    """A folder in which users' code may write, whose user is another one where this is root."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


@pytest.fixture
def scorer_file(tmp_path):
    """Writes a user's scorer and returns its name."""

    def write(body: str, name: str = "mine.py") -> str:
        lines = ["def score(prompt, completion, reference, metadata):", *body.splitlines()]
        text = "\n    ".join(lines) if not body.startswith("#file") else body
        (tmp_path / name).write_text(text + "\n")
        return f"{name}:score"

    return write
