"""What it costs that no bit differs: seconds of generating and of learning, with `deterministic` and without.

One engine and one trainer here, one thread: `python benchmarks/on_policy.py [--model DIRECTORY] [--dtype T]`.
Prints one JSON line: `generate_ratio` and `learn_ratio` are the seconds with it over those without, `differing` and
`differing_deterministic` the shares of tokens whose log-prob the trainer computes to other bits.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import torch
from _harness import emit, machine, say
from headrace_modelkit.presets.tiny import write_tiny
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.base import Engine, EngineConfig, Policy, WeightEntry, Weights
from headrace_rollout.engines.samples import Distribution, Group, SlotKey, Stream, TrajectoryUpdate
from headrace_rollout.engines.samples import Sample as Asked
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends import build_backend
from headrace_trainer.backends._base import Backend
from headrace_trainer.group.forming import join_trainer_group
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.figures import differences
from headrace_trainer.learning.samples import Rows, Sample

PROMPT, GROUPS = 40, 2
WAIT_S = 600.0


def main() -> None:
    """Prints a line of each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a directory; default: the tiny model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--samples", type=int, default=8, help="of each of two prompts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    say(machine())
    ranks = join_trainer_group(1, 0, 1, "", 10.0, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or Path(folder) / "tiny"
        if given.model is None:
            write_tiny(model)
        seconds, shares = [], []
        for deterministic in (False, True):
            section = ModelSection(path=str(model), dtype=given.dtype)
            made, differ, generated, learned = asyncio.run(
                measure(section, ranks, given.samples, given.tokens, deterministic=deterministic)
            )
            seconds.append((generated, learned))
            shares.append(differ / made)
            say(
                f"deterministic: {str(deterministic).lower():5}  {made} tokens: generated in {generated:.2f} s, "
                f"learned in {learned:.2f} s; {differ} log-probs differ"
            )
    ranks.leave()
    (plain_g, plain_l), (exact_g, exact_l) = seconds
    ratios = {"generate_ratio": exact_g / plain_g, "learn_ratio": exact_l / plain_l}
    emit("on_policy", {**ratios, "differing": shares[0], "differing_deterministic": shares[1]})


async def measure(
    section: ModelSection, ranks: TrainerGroup, samples: int, tokens: int, *, deterministic: bool
) -> tuple[int, int, float, float]:
    """Tokens made, and those whose log-probs differ; seconds of generating, and of forward and backward."""
    config = TrainerConfig(model=section, deterministic=deterministic)
    backend = build_backend(config, build_algorithm(config.algorithm), ranks)
    backend.load_initial()
    engine = ENGINES.choose("transformers", {}).build(
        EngineConfig(section, load_tokenizer(section), samples * GROUPS, deterministic=deterministic)
    )
    await engine.install(Policy(1, "one"), published(backend))
    drawn = torch.randint(
        3, engine.vocabulary_size, (GROUPS, PROMPT), generator=torch.Generator().manual_seed(0)
    )
    groups = [
        Group(at, ids, [Asked(each, 1) for each in range(samples)]) for at, ids in enumerate(drawn.tolist())
    ]
    await generate(engine, groups, tokens)  # the first packs the weights
    began = time.perf_counter()
    answers = await generate(engine, groups, tokens)
    generated = time.perf_counter() - began
    rows: Rows = [
        [sample_of(group, answers[SlotKey(group.prompt_ordinal, at)]) for at in range(samples)]
        for group in groups
    ]
    await engine.close()
    backend.micro(rows)
    began = time.perf_counter()
    backend.micro(rows)
    learned = time.perf_counter() - began
    flat = [sample for row in rows for sample in row]
    found = backend.infer(rows, ["old_log_probs"])
    off = list(differences(flat, [each["old_log_probs"] for each in found]))
    made = sum(len(sample.trained) for sample in flat)
    return made, len(off), generated, learned


def published(backend: Backend) -> Weights:
    """The trainer's weights as an engine installs them."""
    entries, body = [], bytearray()
    kinds = {name: (kind, shape) for name, kind, shape in backend.weight_layout()}
    for name, tensor in backend.weights(published=True):
        kind, shape = kinds[name]
        data = tensor.to(getattr(torch, kind)).contiguous().flatten().view(torch.uint8).numpy().tobytes()
        entries.append(WeightEntry(name, kind, shape, len(body), len(data), digest_bytes(data)))
        body += data
    return Weights(tuple(entries), memoryview(bytes(body)))


async def generate(engine: Engine, groups: list[Group], tokens: int) -> dict[SlotKey, TrajectoryUpdate]:
    """All answers, of so many tokens at most."""
    loop, ended, found = asyncio.get_running_loop(), asyncio.Event(), dict[SlotKey, TrajectoryUpdate]()
    wanted = sum(len(group.samples) for group in groups)

    def take(outputs: list[TrajectoryUpdate]) -> None:
        found.update((output.key, output) for output in outputs if output.whole is not None)
        if len(found) == wanted:
            loop.call_soon_threadsafe(ended.set)

    def failed(reason: str) -> None:
        raise RuntimeError(reason)

    stream = Stream(1, Distribution(), tokens, 7, take, failed)
    await engine.submit(stream, groups)
    async with asyncio.timeout(WAIT_S):
        await ended.wait()
    return found


def sample_of(group: Group, output: TrajectoryUpdate) -> Sample:
    """An answer as it is learned from."""
    assert output.whole is not None
    prompt, ids = list(group.prompt_ids), list(output.whole.token_ids)
    trained = list(range(len(prompt), len(prompt) + len(ids)))
    ones = [1.0] * len(ids)
    return Sample(prompt + ids, trained, list(output.whole.log_probs), advantages=ones, weight=1.0)


if __name__ == "__main__":
    main()
