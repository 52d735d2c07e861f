"""Several agents search side by side: one that leads asks for what it needs, and each need is a seeker of its own.

As WideSeek-R1 (https://arxiv.org/abs/2602.04634) has it, in one program around the `openai` client: the lead's
conversation and each seeker's are branches of one session, and all learn from its reward. A seeker reads nothing but
its own task, so that what others found does not fill its context.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

from headrace_search.tool import SearchOptions, build
from openai import AsyncOpenAI

LEAD = (
    "Answer the question. First write what has to be found, each on a line of its own as FIND: what. Others look for "
    "it, all at once, and you are told what they found. Then write ANSWER: the answer."
)
SEEKER = "Find what is asked for. Write SEARCH: words to search texts for them, or FOUND: what you found, in one line."
MOST_SEEKERS, SEARCHES = 8, 3
client = AsyncOpenAI()


@cache
def search(path: str) -> Any:
    """The tool, made once."""
    return build(SearchOptions(path=Path(path), results=2))


async def said(messages: list[dict[str, str]]) -> str:
    """The policy's next turn, which is added."""
    answer = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
    text = answer.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    return text


async def seek(task: str, path: str) -> str:
    """What one seeker found."""
    messages = [{"role": "system", "content": SEEKER}, {"role": "user", "content": task}]
    for _ in range(SEARCHES):
        text = await said(messages)
        if call := re.search(r"SEARCH:(.+)", text):
            found = await asyncio.to_thread(
                lambda query=call[1]: search(path).begin({"query": query}, 10.0)(10.0)
            )
            messages.append({"role": "user", "content": str(found)})
            continue
        return text.partition("FOUND:")[2].strip() or "nothing"
    return "nothing"


async def play(seed: int, item: dict[str, Any]) -> dict[str, Any]:
    """One question of several parts; the reward is the share of the parts that the answer names."""
    path, parts = item["index_path"], json.loads(item["answer"])
    messages = [{"role": "system", "content": LEAD}, {"role": "user", "content": item["question"]}]
    tasks = re.findall(r"FIND:(.+)", await said(messages))[:MOST_SEEKERS]
    if tasks:
        found = await asyncio.gather(*(seek(task.strip(), path) for task in tasks))
        told = "\n".join(f"{task.strip()}: {each}" for task, each in zip(tasks, found, strict=True))
        messages.append({"role": "user", "content": told})
        await said(messages)
    answer = messages[-1]["content"].partition("ANSWER:")[2]
    right = sum(part in answer for part in parts) / len(parts)
    return {"reward": right, "success": right == 1.0}


def rows(
    count: int = 400, width: int = 4, seed: int = 0
) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """A made corpus of towns, and questions about several of them; the answer is a list of numbers, as JSON."""
    chance = random.Random(seed)
    towns = {
        f"{a}{b}{c}": str(chance.randint(1000, 9999))
        for a in ("Al", "Bor", "Cas", "Dun", "El")
        for b in ("den", "mar", "ros", "tin", "vel")
        for c in ("burg", "ford", "ham", "stead", "wick")
    }
    texts = [
        {"text": f"{town} was founded by weavers. {town} has {number} people."}
        for town, number in towns.items()
    ]
    questions = []
    for _ in range(count):
        asked = chance.sample(sorted(towns), width)
        question = f"How many people has each of these towns: {', '.join(asked)}?"
        questions.append({"question": question, "answer": json.dumps([towns[town] for town in asked])})
    return texts, questions


if __name__ == "__main__":
    folder = Path(".headrace/wide")
    folder.mkdir(parents=True, exist_ok=True)
    texts, questions = rows()
    given = {"index_path": str((folder / "index").absolute())}
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)), encoding="utf-8")
    lines = (json.dumps(row | given) for row in questions)
    (folder / "questions.jsonl").write_text("\n".join(lines), encoding="utf-8")
