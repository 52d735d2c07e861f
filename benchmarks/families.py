"""Tiny models of many families, trained and generated, against transformers' own: `python benchmarks/families.py`.

A group of 8 answers (20 tokens each, behind a prompt of 100) goes through the trainer's learner and backend, and as
padded rows through the model's class with a backward pass; 8 answers of 24 tokens are sampled by the built-in
engine and by the class's `generate`. Turn about, fp32, one torch thread; the time is the process's own. The models
are those of the tests, eight times as wide, so that the products count.

Prints one JSON line with `FAMILY_trained` and `FAMILY_generated`, tokens/s over transformers', and the least of
each kind: `least_trained_shared`, `least_trained_apart`, `least_generated`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from _harness import emit, machine, say, table

SIZE, PROMPT, ANSWER, SAMPLED = 8, 100, 20, 24
USED: tuple[str, ...] = (
    "qwen3_5_text",
    "qwen3_next",
    "gpt_oss",
    "gemma3_text",
    "gemma4_text",
    "deepseek_v3",
    "glm4_moe",
)
USED += ("nemotron_h", "llama4_text", "ministral3", "smollm3", "olmo3", "granitemoehybrid", "phi3")
"""The families by how many people train them."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=list(USED), help="by the names of docs/models.md")
    parser.add_argument("--turns", type=int, default=5, help="measured turns of each side")
    options = parser.parse_args()
    import torch  # not at the top: --help must not wait for it
    from headrace_modelkit.families.known import KNOWN
    from headrace_trainer.group.forming import join_trainer_group

    torch.set_num_threads(1)
    say(machine())
    figures: dict[str, float] = {}
    rows = []
    ranks = join_trainer_group(1, 0, 1, "", 30.0, torch.device("cpu"))
    for family in options.families:
        trained, generated = measure(family, options.turns, ranks)
        figures[f"{family}_trained"] = trained
        if generated is not None:
            figures[f"{family}_generated"] = generated
        shown = "refused" if generated is None else f"{generated:.2f}"
        rows.append((family, "shared" if KNOWN[family].shares else "apart", f"{trained:.2f}", shown))
        say(" ".join(map(str, rows[-1])))
    ranks.leave()
    table(("family", "rows", "trained", "generated"), rows)
    say(machine())
    for kind, shares in (("shared", True), ("apart", False)):
        own = [figures[f"{each}_trained"] for each in options.families if KNOWN[each].shares is shares]
        figures |= {f"least_trained_{kind}": min(own)} if own else {}
    ratios = [value for name, value in figures.items() if name.endswith("_generated")]
    emit("families", figures | ({"least_generated": min(ratios)} if ratios else {}))


def measure(family: str, turns: int, ranks: Any) -> tuple[float, float | None]:
    """Tokens/s over transformers' of training and of generating; None where the engine refuses the family."""
    from headrace_modelkit.errors import ModelNotReadable
    from headrace_modelkit.presets.families import FAMILIES, write_family

    wide = {"max_position_embeddings": 256, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        path = Path(folder) / "model"
        own = {
            key: value
            for key, value in wide.items()
            if key != "head_dim" or "q_lora_rank" not in FAMILIES[family]
        }
        if heads := FAMILIES[family].get("mamba_n_heads"):
            own["mamba_d_head"] = 2 * own["hidden_size"] // heads
        model: Any = write_family(path, family, **own)
        trained = ratio(*trainings(path, model, ranks), turns)
        try:
            sides = generations(path, model)
        except ModelNotReadable:
            return trained, None
        return trained, ratio(*sides, turns)


def ratio(ours: Callable[[int], object], theirs: Callable[[int], object], turns: int) -> float:
    """The median over turns of their seconds over ours, which do the same work."""
    found = []
    for turn in range(-1, turns):
        seconds = {}
        for side in (ours, theirs) if turn % 2 else (theirs, ours):
            started = time.process_time()
            side(turn + 1)
            seconds[side] = time.process_time() - started
        if turn >= 0:
            found.append(seconds[theirs] / seconds[ours])
    return median(found)


def trainings(path: Path, model: Any, ranks: Any) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """One group's forward, loss and backward: ours, and the class's of padded rows with the plain policy gradient."""
    import torch
    from _gradient import Accumulation, synthetic_group

    own = Accumulation(path, "float32", ranks, SIZE, shared=None)

    def group(turn: int) -> Any:
        return synthetic_group(
            turn, SIZE, (ANSWER, ANSWER), model.config.get_text_config().vocab_size, given=PROMPT
        )

    def ours(turn: int) -> None:
        own.learn([group(turn)])
        own.gradient()

    def theirs(turn: int) -> None:
        members = group(turn).members
        tokens_BT = torch.tensor([list(each.samples[0].tokens) for each in members])
        logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits[:, PROMPT - 1 : -1]
        chosen_BT1 = logits_BTV.float().log_softmax(-1).gather(-1, tokens_BT[:, PROMPT:, None])
        rewards_B = torch.tensor([each.reward for each in members])
        (-(chosen_BT1[..., 0].sum(1) * (rewards_B - rewards_B.mean())).sum()).backward()
        model.zero_grad()

    return ours, theirs


def generations(path: Path, model: Any) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """Answers to prompts of one length: the engine's, and those of `generate`. Raises ModelNotReadable."""
    import torch
    from _engine_bare import Load
    from decode import BuiltIn

    load = Load(str(path), SIZE, PROMPT, SAMPLED, "float32")
    loop = asyncio.new_event_loop()
    engine = loop.run_until_complete(BuiltIn.of(load, SIZE))

    def asked(turn: int) -> list[list[int]]:
        drawn = torch.Generator().manual_seed(turn)
        return torch.randint(3, 32, (SIZE, PROMPT), generator=drawn).tolist()

    def ours(turn: int) -> None:
        loop.run_until_complete(engine.answer(asked(turn), SAMPLED))

    def theirs(turn: int) -> None:
        with torch.no_grad():
            model.generate(
                torch.tensor(asked(turn)),
                do_sample=True,
                max_new_tokens=SAMPLED,
                min_new_tokens=SAMPLED,
                pad_token_id=0,
            )

    return ours, theirs


if __name__ == "__main__":
    main()
