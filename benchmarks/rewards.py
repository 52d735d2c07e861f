"""Answers that are scored a second: `python benchmarks/rewards.py [--answers N] [--verl FOLDER]`.

Scores mathematics with `math_verify` and code with `code` in the reward service's own children, one a core, and prints
one JSON line: `math_per_s`, `code_per_s` (programs with five inputs and outputs each, every fourth of them wrong) and
`p99_ms` (of a program, from its child's view). With `--verl`, verl's `prime_code` scores the same programs in a
process for each core: `verl_code_per_s`. The folder is `verl/utils/reward_score` of an installed verl
(`pip install --no-deps verl`); verl runs code with the scoring process's own rights.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from _harness import emit, machine, say
from headrace_reward.config import PoolSettings
from headrace_reward.runs import Item, Run, Status
from headrace_schema.sections.scoring import RewardSection

RIGHT = "```python\nn = int(input())\nprint(sum(int(input()) for _ in range(n)))\n```"
WRONG = "```python\nn = int(input())\nprint(0)\n```"
INPUTS = [f"{n}\n" + "\n".join(map(str, range(n))) + "\n" for n in (2, 3, 10, 100, 1000)]
TESTS = json.dumps({"inputs": INPUTS, "outputs": [f"{n * (n - 1) // 2}\n" for n in (2, 3, 10, 100, 1000)]})
MATH = (r"So the answer is $\boxed{\frac{1}{2} + x^2}$.", r"$x^2 + 0.5$")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--answers", type=int, default=200, help="programs that are scored, and a tenth of the sums"
    )
    parser.add_argument("--verl", type=Path, help="verl/utils/reward_score of an installed verl")
    options = parser.parse_args()
    say(machine())
    codes = [WRONG if index % 4 == 3 else RIGHT for index in range(options.answers)]
    figures = asyncio.run(ours(codes, 10 * options.answers))
    if options.verl is not None:
        figures |= verls(options.verl, codes)
    emit("rewards", figures)


async def ours(codes: list[str], sums: int) -> dict[str, float]:
    """Both scorers, in the children of a reward service."""
    math_per_s, _ = await _scored("math_verify", [MATH] * sums)
    code_per_s, walls = await _scored("code", [(code, TESTS) for code in codes])
    return {
        "math_per_s": math_per_s,
        "code_per_s": code_per_s,
        "p99_ms": sorted(walls)[int(0.99 * len(walls))] * 1e3,
    }


async def _scored(name: str, answers: list[tuple[str, str]]) -> tuple[float, list[float]]:
    """Answers a second, and the seconds of each."""
    section = RewardSection.model_validate({"scorers": [{"name": name}], "timeout_s": 60})
    run = Run(section, Path.cwd(), PoolSettings.model_validate({"children": os.cpu_count() or 1}))
    await run.open()
    warm = [_item(index - 64, *answers[0]) for index in range(8)]
    await asyncio.gather(*map(run.score, warm))
    begun = time.perf_counter()
    verdicts = await asyncio.gather(*(run.score(_item(index, *each)) for index, each in enumerate(answers)))
    rate = len(answers) / (time.perf_counter() - begun)
    await run.close()
    assert all(verdict.status is Status.OK for verdict in verdicts), verdicts[0]
    assert all(
        verdict.reward == float(each[0] != WRONG) for verdict, each in zip(verdicts, answers, strict=True)
    )
    return rate, [verdict.wall_s for verdict in verdicts]


def _item(index: int, completion: str, reference: str) -> Item:
    answer = {
        "prompt": "",
        "completion": completion,
        "reference": reference,
        "metadata": {},
        "token_count": 1,
    }
    return Item(index + 64, 0, 1, False, False, answer)


def verls(folder: Path, codes: list[str]) -> dict[str, float]:
    """verl's function on the same programs."""
    with ProcessPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(_verl, [folder] * 4, codes[:4]))
        begun = time.perf_counter()
        scores = list(pool.map(_verl, [folder] * len(codes), codes))
        rate = len(codes) / (time.perf_counter() - begun)
    agreed = sum(score == float(code != WRONG) for score, code in zip(scores, codes, strict=True))
    say(f"verl: {agreed} of {len(codes)} verdicts are the expected ones")
    return {"verl_code_per_s": rate}


def _verl(folder: Path, completion: str) -> float:
    sys.path.append(str(folder))
    return float(importlib.import_module("prime_code").compute_score(completion, TESTS, continuous=True)[0])


if __name__ == "__main__":
    main()
