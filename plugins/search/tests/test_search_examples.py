"""The examples that search do what they say, with a policy that plays by their rules."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from headrace_search.index import build

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "agents"


def load(name, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Policy:
    """In the place of the endpoint: leads, or seeks by the town's name. It answers seekers once all have asked."""

    def __init__(self, width):
        self.branches, self._together = [], asyncio.Barrier(width)
        self.chat = SimpleNamespace(completions=self)

    async def create(self, model, messages):
        asked, last = messages[1]["content"], messages[-1]["content"]
        towns = re.findall(r"[A-Z][a-z]+", asked.partition("towns:")[2])
        if messages[0]["content"].startswith("Answer"):
            found = re.findall(r"\d{4}", last)
            text = f"ANSWER: {', '.join(found)}" if found else "\n".join(f"FIND: {town}" for town in towns)
        elif len(messages) == 2:
            await self._together.wait()
            text = f"SEARCH: {asked} people"
        else:
            self.branches.append(messages)
            text = f"FOUND: {re.search(rf'{asked} has ([0-9]+)', last)[1]}"
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text))])


async def test_seekers_search_side_by_side_each_with_its_own_task(monkeypatch, tmp_path):
    wide = load("wide_search", monkeypatch)
    texts, questions = wide.rows(count=2)
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    policy = Policy(4)
    monkeypatch.setattr(wide, "client", policy)
    item = questions[0] | {"index_path": str(tmp_path / "texts.jsonl")}
    async with asyncio.timeout(60):
        assert await wide.play(0, item) == {"reward": 1.0, "success": True}
    assert len(policy.branches) == 4
    assert len({messages[1]["content"] for messages in policy.branches}) == 4
    lost = item | {"answer": json.dumps([*json.loads(item["answer"])[:3], "none"])}
    assert (await wide.play(0, lost))["reward"] == 0.75


@pytest.mark.parametrize("indexed", [True, False])
def test_who_searches_first_is_right(monkeypatch, tmp_path, indexed):
    lookup = load("lookup", monkeypatch)
    corpus = tmp_path / "lookup.jsonl"
    corpus.write_text("\n".join(map(json.dumps, lookup.corpus())))
    if indexed:
        build(corpus, tmp_path / "index")
    environment = lookup.Lookup(str(tmp_path / "index" if indexed else corpus))
    ((asked,), home) = environment.reset(7, {}), environment.number
    name = asked["content"][:-1]
    assert lookup.homes()[name] == home
    ((told,), reward, done, _) = environment.step({"content": f"{name}?"})
    assert told["content"] == f"{home}=" and (reward, done) == (0.0, False)
    assert environment.step({"content": home})[1:] == (1.0, True, {"success": True})
    environment.reset(7, {})
    assert environment.step({"content": "1"})[1:3] == (0.0, True)
