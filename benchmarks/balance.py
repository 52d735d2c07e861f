"""How evenly ranks compute, what the leader spends on planning, and what a rank is sent, against what it needs.

`python benchmarks/balance.py` prints a JSON object; without a model, a group of ranks or a device.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import msgspec
from headrace_trainer.learning.planning import Costs, plan_batches, plan_rounds, plan_rows
from headrace_trainer.learning.samples import Rows, Sample
from headrace_trainer.ranks.messages import Header, MicroRound

HIDDEN = 4096
"""Of a 7B: attention costs as much as all else at 12 times as many tokens."""


def groups_of(count: int, samples: int, longest: int, seed: int) -> list[list[Sample]]:
    """Groups whose answers have a long tail up to `longest` tokens, with the columns of a usual run."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        prompt = [draw.randrange(1000) for _ in range(draw.randrange(100, 300))]
        group = []
        for _ in range(samples):
            length = min(longest - len(prompt), int(draw.lognormvariate(6.2, 0.8)) + 20)
            tokens = prompt + [draw.randrange(1000) for _ in range(length)]
            trained = list(range(len(prompt), len(tokens)))
            values = [draw.random() for _ in trained]
            group.append(Sample(tokens, trained, values, values, 1.0, {"old_log_probs": values}))
        found.append(group)
    return found


def cost(rows: Rows, costs: Costs) -> float:
    """Of one micro-batch; rows are planned again as they were."""
    lengths = [plan_rows(row, 1 << 40, shared=True)[0][0] for row in rows]
    return costs.of_batch(lengths) if lengths else 0.0


def measure(ranks: int, groups: list[list[Sample]], budget: int, costs: Costs) -> dict[str, float]:
    """One batch of groups on so many ranks."""
    tokens = sum(len(sequence.tokens) for group in groups for sequence in group)
    started = time.perf_counter()
    plan = list(plan_rounds(groups, budget, replicas=ranks, shared=True, costs=costs))
    planned_s = time.perf_counter() - started
    encoder = msgspec.msgpack.Encoder()
    started = time.perf_counter()
    sent = [
        [len(encoder.encode(Header(1, 1, 0, 1, MicroRound([rows], {})))) for rows in work] for work, _ in plan
    ]
    encoded_s = time.perf_counter() - started
    priced = [[cost(rows, costs) for rows in work] for work, _ in plan]
    ideal = sum(map(sum, priced)) / ranks
    every = [plan_rows(group, budget, shared=True) for group in groups]
    lengths = [length for rows in every for length, _ in rows]
    plain = plan_batches(lengths, budget)
    before = sum(
        max(costs.of_batch([lengths[row] for row in batch]) for batch in plain[first : first + ranks])
        for first in range(0, len(plain), ranks)
    )
    own = sum(costs.of_batch([length]) for length in lengths) / ranks
    most = max(sum(work[rank] for work in sent) for rank in range(ranks))
    needed = max(sum(len(encoder.encode(work[rank])) for work, _ in plan) for rank in range(ranks))
    return {
        "balance_vs_ideal": own / sum(map(max, priced)),
        "balance_of_ranks": ideal / sum(map(max, priced)),
        "balance_of_full_batches": own / before,
        "rounds": len(plan),
        "plan_us_per_token": planned_s * 1e6 / tokens,
        "encode_us_per_token": encoded_s * 1e6 / tokens,
        "sent_vs_own_rows": most / needed,
        "sent_vs_all_rows": most / sum(map(sum, sent)),
        "tokens": tokens,
    }


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=8192, help="trainer.micro_batch_tokens")
    options = parser.parse_args()
    found: dict[str, float] = {}
    for ranks, count, padded in ((4, 16, False), (4, 16, True), (64, 128, False)):
        costs = Costs(12.0 * HIDDEN, padded=padded)
        rows = [
            measure(ranks, groups_of(count, 8, 2048, seed), options.budget, costs)
            for seed in range(options.seeds)
        ]
        name = f"{ranks}_ranks" + ("_padded" if padded else "")
        found |= {f"{name}_{key}": sum(row[key] for row in rows) / len(rows) for key in rows[0]}
    found |= {"balance_vs_ideal": found["4_ranks_balance_vs_ideal"]}
    found |= {
        "leader_us_per_token": found["4_ranks_plan_us_per_token"] + found["4_ranks_encode_us_per_token"]
    }
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
