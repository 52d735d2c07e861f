"""`headrace data FILE` and `headrace reward FILE --on ANSWERS`: what a run would see, and pay, without a fleet."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace_cli.commands.options import JsonFlag, complete_key
from headrace_cli.errors import EXIT_USER_ERROR, CommandError, refused, user_error
from headrace_cli.output import console, print_json, table
from headrace_cli.show.reporters import BLOCKS
from headrace_cli.show.runs import measured

if TYPE_CHECKING:
    from headrace_coordinator.data.dataset import Dataset
    from headrace_schema.spec import RunSpec

BUCKETS = 40


@dataclass(frozen=True)
class Lengths:
    """Lengths of all training prompts, ascending, in `unit`."""

    unit: str
    values: Sequence[int]

    def marks(self) -> dict[str, int]:
        """Shortest, middle, 99th percentile and longest."""
        last = len(self.values) - 1
        return {
            "shortest": self.values[0],
            "median": self.values[last // 2],
            "p99": self.values[-(-99 * last // 100)],
            "longest": self.values[last],
        }

    def picture(self, width: int) -> str:
        """A histogram from the shortest to the longest."""
        low, high = self.values[0], self.values[-1]
        buckets = max(1, min(width, BUCKETS, high - low + 1))
        counts = [0] * buckets
        for value in self.values:
            counts[min(buckets - 1, (value - low) * buckets // max(1, high - low + 1))] += 1
        top = max(counts)
        return "".join(" " if not count else BLOCKS[(len(BLOCKS) - 1) * count // top] for count in counts)


def dataset_lines(document: Mapping[str, Any], lengths: Lengths, width: int) -> Iterator[str]:
    """What is trained on, what is held out, what is left out and why, and how long prompts are."""
    yield f"{document['items']} items: {document['train']} to train on, {document['heldout']} held out"
    if document["repeated"]:
        yield f"  {document['repeated']} repeat an earlier one and are left out"
    if document["contradicting"]:
        yield f"  {document['contradicting']} are answered in more than one way; the first answer counts"
    for reason, count in document["left_out"].items():
        yield f"  {count} left out: {reason}"
    if document["unanswered"]:
        yield f"  {document['unanswered']} of those to train on have no answer"
    if document["too_long"]:
        yield f"  {document['too_long']} prompts are longer than data.prompt.longest, and dropped in their turn"
    for name, count in document["evaluation"].items():
        yield f"evaluation.data.{name}: {count} items"
    marks = lengths.marks()
    yield f"prompts, {lengths.unit}: " + ", ".join(f"{name} {value}" for name, value in marks.items())
    yield f"  {marks['shortest']} {lengths.picture(width - 20)} {marks['longest']}"


Spec = Annotated[Path, typer.Argument(metavar="FILE", help="Run spec, a YAML file.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override, such as data.heldout=64.", autocompletion=complete_key
    ),
]
PROMPT_CHARACTERS = 1200
MORE = (
    "messages",
    "finish_reason",
    "raw_prompt",
    "raw_completion",
    "prompt_ids",
    "completion_ids",
    "group",
)
"""Keys of an answer that scorers may ask for; they go as they are."""


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("data")(data)
    app.command("reward")(reward)


def data(
    file: Spec,
    sets: Sets = None,
    prompts: Annotated[int, typer.Option("--prompts", min=0, help="Rendered prompts to show.")] = 2,
    as_json: JsonFlag = False,
) -> None:
    """Show the items of a run spec: how many, what is left out and why, lengths, the first prompts as the model
    reads them. Needs no fleet; lengths are in tokens where the model's directory is here, else in characters.
    """
    spec = _spec(file, sets, "headrace data", "headrace_coordinator")

    opened = open_dataset(spec)
    codec = tokenizer_of(spec)
    texts = list(rendered(opened, codec))
    lengths = Lengths("tokens" if codec else "characters", sorted(length for length, _ in texts))
    shown = [text for _, text in texts[:prompts]]
    heldout, longest = len(opened.heldout_items()), spec.data.prompt.longest
    too_long = sum(length > longest for length, _ in texts) if codec and longest else None
    document = {
        "items": opened.train_size + heldout,
        "train": opened.train_size,
        "heldout": heldout,
        "repeated": opened.repeated,
        "contradicting": opened.contradicting,
        "unanswered": opened.unanswered(),
        "left_out": opened.left_out,
        "too_long": too_long,
        "lengths": {"unit": lengths.unit, **lengths.marks()},
        "evaluation": {name: len(items) for name, (_, items) in opened.sets.items()},
        "prompts": shown,
    }
    if as_json:
        print_json(document)
        return
    for line in dataset_lines(document, lengths, console().width):
        console().print(line)
    for number, text in enumerate(shown, 1):
        console().print(f"\nprompt {number} of the training order", style="bold")
        console().print(text[:PROMPT_CHARACTERS], markup=False)


def reward(
    file: Spec,
    on: Annotated[
        Path,
        typer.Option(
            "--on",
            metavar="ANSWERS",
            help="JSON lines with completion, and prompt, reference, metadata where scorers use them.",
        ),
    ],
    sets: Sets = None,
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="Score by reward.evaluation, as held-out answers are.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Score answers of a file with the scorers of a run spec: the same children, limits and weights as in a run."""
    spec = _spec(file, sets, "headrace reward", "headrace_reward")
    answers = list(_answers(on))
    verdicts = asyncio.run(scored(spec, answers, evaluation))
    rows = [
        {
            "completion": answer["completion"],
            "reward": verdict.reward,
            "parts": dict(verdict.parts),
            "status": verdict.status.value,
            "detail": verdict.detail,
        }
        for answer, verdict in zip(answers, verdicts, strict=True)
    ]
    names = sorted({name for verdict in verdicts for name in verdict.parts})
    mean = {name: fmean(v.parts[name] for v in verdicts if name in v.parts) for name in names}
    failed = sum(bool(verdict.detail) for verdict in verdicts)
    judged = [verdict.reward for verdict in verdicts if not verdict.detail]
    average = fmean(judged) if judged else None
    if as_json:
        print_json({"reward": average, "parts": mean, "failed": failed, "answers": rows})
        return
    console().print(
        f"{len(rows)} answers: mean reward {measured(average, '.4g')}"
        + (f", {failed} not judged" if failed else "")
    )
    width = max(20, console().width - 40)
    shown = [
        (
            "–" if row["detail"] else f"{row['reward']:.4g}",
            row["completion"].replace("\n", "\\n")[:width],
            row["detail"],
        )
        for row in rows[:20]
    ]
    console().print(table([">reward", "answer", "detail"], shown))
    if names:
        console().print(table(["part", ">mean"], [(name, f"{mean[name]:.4g}") for name in names]))


def _spec(file: Path, sets: list[str] | None, command: str, needed: str) -> RunSpec:
    """The checked spec; raises CommandError where the file, a key or a package is wrong."""
    from headrace.client import HeadraceError, load_spec

    from headrace_cli.dry_run import check_schema

    if find_spec(needed) is None:
        raise user_error(command, f"{needed} is not installed", "pip install 'headrace[local]'")
    try:
        loaded = load_spec(file, sets or [])
    except HeadraceError as error:
        raise refused(error) from error
    check_schema(loaded)
    from headrace_schema.spec import RunSpec

    return RunSpec.model_validate(loaded)


def _answers(file: Path) -> Iterator[dict[str, Any]]:
    """The answers of a file; raises CommandError naming the line that is wrong."""
    from headrace_schema.text_files import numbered_lines

    try:
        lines = list(numbered_lines(file))
    except (OSError, UnicodeDecodeError) as error:
        raise user_error("--on", f"{file} cannot be read ({error})", "name a file of JSON lines") from error
    found = 0
    for number, line in lines:
        fix = 'write {"completion": …, "prompt": …, "reference": …, "metadata": {…}}'
        try:
            row = json.loads(line)
        except ValueError as error:
            raise user_error("--on", f"line {number} of {file} is not JSON ({error})", fix) from error
        if not isinstance(row, dict) or not isinstance(row.get("completion"), str):
            raise user_error("--on", f"line {number} of {file} has no text under 'completion'", fix)
        metadata, tokens = row.get("metadata"), row.get("token_count") or row.get("tokens") or 0
        if isinstance(tokens, bool) or not isinstance(tokens, int):
            raise user_error(
                "--on", f"line {number} of {file} has {tokens!r} as 'token_count'", "write a number"
            )
        found += 1
        yield {
            "prompt": str(row.get("prompt", "")),
            "completion": row["completion"],
            "reference": str(row.get("reference", "")),
            "metadata": metadata if isinstance(metadata, dict) else {},
            "token_count": tokens,
            **{key: row[key] for key in MORE if key in row},
        }
    if not found:
        raise user_error("--on", f"{file} holds no answer", "name a file of JSON lines")


def open_dataset(spec: RunSpec) -> Dataset:
    """The items of a run and of evaluation.data; raises CommandError with the keys that are wrong."""
    from headrace.client.errors import Problem
    from headrace_coordinator.data.dataset import Dataset
    from headrace_schema.problems import Impossible

    try:
        opened = Dataset.open(spec.data, spec.seed)
        opened.open_sets(spec)
        return opened
    except Impossible as error:
        problems = [Problem(each.key, each.problem, each.fix) for each in error.problems]
        raise CommandError(
            str(error), reason="INVALID", exit_code=EXIT_USER_ERROR, problems=problems
        ) from error


def tokenizer_of(spec: RunSpec) -> Any:
    """The model's tokenizer, where its directory and the packages are here."""
    if find_spec("headrace_modelkit") is None or not Path(os.path.expanduser(spec.model.path)).is_dir():
        return None
    from headrace_modelkit.errors import ModelNotReadable
    from headrace_modelkit.tokenizer import load_tokenizer

    try:
        return load_tokenizer(spec.model)
    except ModelNotReadable as error:
        raise user_error("model.path", str(error), "mend the directory") from error


def rendered(opened: Dataset, codec: Any) -> Iterator[tuple[int, str]]:
    """Length and text of each training prompt, in the training order; special tokens are visible."""
    for ordinal in range(opened.train_size):
        content = opened.prompt(opened.train_item(ordinal))
        if codec is None:
            turns = content.chat or [{"role": "", "content": content.text or ""}]
            text = "\n".join(f"{turn['role']}: {turn['content']}".removeprefix(": ") for turn in turns)
            yield len(text), text + content.prefill
            continue
        try:
            ids = codec.encode_prompt(
                content.chat,
                content.text,
                content.prefill if content.chat else "",
                content.arguments,
                content.images,
            )
        except ValueError as error:
            raise user_error(
                "data.prompt", str(error), "change the prompt, or the model's template"
            ) from error
        yield len(ids), codec.decode(ids, skip_special_tokens=False)


async def scored(spec: RunSpec, answers: list[dict[str, Any]], evaluation: bool) -> list[Any]:
    """The verdicts on answers, in their order: of the children, limits and weights of a run."""
    from headrace_reward.config import PoolSettings
    from headrace_reward.pool import OpenFault
    from headrace_reward.runs import Item, Run

    run = Run(spec.reward, Path.cwd(), PoolSettings.model_validate({}))
    try:
        await run.open()
    except OpenFault as fault:
        key = f"reward.{fault.scorer_set}[{fault.index}].{fault.field}"
        raise user_error(key, fault.message, "mend the scorer") from fault
    try:
        items = [Item(number, 0, 1, evaluation, False, answer) for number, answer in enumerate(answers)]
        return list(await asyncio.gather(*(run.score(item) for item in items)))
    finally:
        await run.close()
