"""`init`: five questions, and a run spec that a fleet takes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from string import Template
from typing import Annotated

import typer
from headrace.client.errors import HeadraceError

from headrace_cli.commands.options import JsonFlag
from headrace_cli.errors import CommandError, refused, user_error, writing
from headrace_cli.output import console, error_console, print_json

TINY = ".headrace/models/tiny"
TINY_DATA = "copy_digits"
KINDS = {
    "answers": "a language model, by answers that a program checks",
    "examples": "a language model, by given answers (supervised)",
    "preferences": "a language model, by pairs of a better and a worse answer (DPO)",
    "robot": "a policy that acts in a simulator",
}
_DATA = {
    "answers": f"rows with a question and its answer: a .jsonl or .parquet file, or {TINY_DATA}",
    "examples": f"rows of a chat: a .jsonl or .parquet file, or {TINY_DATA}",
    "preferences": "rows with prompt, chosen, rejected: a .jsonl or .parquet file",
    "robot": "a Gymnasium task",
}
_SCORERS = {
    "answers": ("exact", "what pays: exact, last_number, math, or FILE.py:FUNCTION"),
    "examples": ("all", "what learns: all weights, or lora"),
    "preferences": ("dpo", "which loss: dpo, ipo, simpo, orpo"),
    "robot": ("ppo", "which algorithm: ppo, grpo"),
}
_HEAD = """\
# Made by `headrace init`; every key: docs/run-spec.md.
#
#   headrace up
#   headrace run submit $file --watch
"""
_MODEL = """\
model:
  path: $model
$dtype"""
_TEMPLATES = {
    "answers": """\
name: $name
steps: $steps
seed: 0

$model_section
$data_section
sampling:
  max_new_tokens: $tokens          # of an answer

algorithm:
  name: grpo
  prompts_per_step: 16        # 16 groups of 8 answers a step
  group_size: 8

optimizer: {lr: $lr}
$warmup
reward:
  scorers:
    - {name: $how}

evaluation: {every: 10}
""",
    "examples": """\
name: $name
workflow: supervised
steps: $steps
seed: 0

$model_section
$data_section
algorithm:
  prompts_per_step: 64         # rows of a step

optimizer: {lr: $lr}
$warmup
evaluation: {every: 10}
""",
    "preferences": """\
name: $name
workflow: preference
steps: $steps
seed: 0

$model_section
$data_section
algorithm:
  name: $how
  prompts_per_step: 16         # pairs of a step

optimizer: {lr: $lr}

evaluation: {every: 10}
""",
    "robot": """\
name: $name
workflow: embodied
steps: $steps
seed: 0

model:
  policy: {kind: mlp, hidden: [64, 64]}

environment:
  backend: gymnasium
  tasks: [$data]
  count: 8

data:
  heldout: 32                  # start states that are never trained on

algorithm:
  name: $how
  group_size: $group
  prompts_per_step: 8          # start states of a step

optimizer: {lr: 1.0e-3}

evaluation: {every: 10}
""",
}


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the spec.")] = Path("run.yaml"),
    kind: Annotated[str, typer.Option(help=f"What learns, and from what: {', '.join(KINDS)}.")] = "",
    model: Annotated[str, typer.Option(help="Directory or id on a hub.", show_default=False)] = "",
    data: Annotated[str, typer.Option(help="File of rows, or a Gymnasium task.", show_default=False)] = "",
    how: Annotated[
        str,
        typer.Option(help="The scorer, loss, weights or algorithm; asked for by kind.", show_default=False),
    ] = "",
    steps: Annotated[int, typer.Option(min=0, help="Steps of the run; 0: ask.", show_default=False)] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Ask five questions and write a run spec. What is given as an option is not asked; nothing is asked beside --json
    or where nobody can answer.
    """
    from headrace_cli.connection import Target
    from headrace_cli.dry_run import check

    if file.exists():
        raise user_error("FILE", f"{file} is there", "name another, or remove it")
    kind = _asked("What learns, and from what?", kind, "answers", as_json, KINDS)
    if kind not in KINDS:
        raise user_error("--kind", f"{kind!r} is not one", f"write one of {', '.join(KINDS)}")
    if kind == "robot":
        if model:
            raise user_error("--model", "a robot's policy is made new", "leave it out; see docs/robots.md")
    else:
        model = _asked("Which model? A directory, or an id on a hub", model, TINY, as_json)
    first = {"preferences": "pairs.jsonl", "robot": "CartPole-v1"}.get(kind, TINY_DATA)
    data = _asked(f"Which data? {_DATA[kind]}", data, first, as_json)
    default, question = _SCORERS[kind]
    how = _asked(f"And {question}?", how, default, as_json)
    while not steps:
        answer = _asked("How many steps?", "", "50", as_json)
        steps = int(answer) if answer.isascii() and answer.isdigit() else 0
    text = spec_text(file, kind, model, data, how, steps)
    with writing(file):
        file.write_text(text, encoding="utf-8")
    try:
        from headrace.client import load_spec

        found = check(load_spec(file), Target("", None, known=False))
    except HeadraceError as error:
        raise refused(error) from error
    except CommandError as error:
        error_console().print(f"{file} is written, and is not valid yet", markup=False)
        raise error
    if as_json:
        print_json({"file": str(file), **found})
        return
    for item in found["warnings"]:
        error_console().print(f"not here yet: {item['key']}: {item['problem']}; {item['fix']}", markup=False)
    console().print(f"{file} is valid; next: headrace up && headrace run submit {file} --watch", markup=False)


def _asked(
    question: str, given: str, default: str, as_json: bool, choices: dict[str, str] | None = None
) -> str:
    if given:
        return given
    if as_json or not sys.stdin.isatty():
        return default
    if not choices:
        return str(typer.prompt(question, default=default, err=True))
    error_console().print(question)
    for number, (name, words) in enumerate(choices.items(), 1):
        error_console().print(f"  {number}  {name:12}  {words}", markup=False)
    answer = str(typer.prompt("Number or name", default="1", err=True))
    names = list(choices)
    return names[int(answer) - 1] if answer.isdigit() and 0 < int(answer) <= len(names) else answer


def spec_text(file: Path, kind: str, model: str, data: str, how: str, steps: int) -> str:
    """The spec, with what the choices mean for its other keys."""
    tiny, lora = model == TINY, kind == "examples" and how == "lora"
    rate = "2.0e-5" if kind == "examples" else "1.0e-6" if kind == "answers" else "5.0e-7"
    warmup = "trainer: {lora: {rank: 16}}\n" if lora else ""
    if tiny and kind == "answers":
        warmup = "trainer: {warmup: {steps: 25, lr: 2.0e-3}}   # it knows nothing yet\n"
    keys = {
        "name": re.sub("[^a-z0-9]+", "-", file.stem.lower()).strip("-") or "run",
        "file": file,
        "steps": steps,
        "model": _scalar(model),
        "dtype": "  dtype: float32               # too small for bfloat16 to pay\n" if tiny else "",
        "data": _scalar(data),
        "how": _scalar(how),
        "tokens": 4 if data == TINY_DATA else 512,
        "lr": "5.0e-4" if tiny else "1.0e-4" if lora else rate,
        "warmup": warmup,
        "group": 8 if how == "grpo" else 1,
    }
    keys["model_section"] = Template(_MODEL).substitute(keys)
    keys["data_section"] = _data_section(kind, data)
    return Template(_HEAD + _TEMPLATES[kind]).substitute(keys)


def _scalar(text: str) -> str:
    """As YAML reads a text back."""
    return (
        text if re.fullmatch(r"[A-Za-z_./~][\w./~-]*(:\w+)?", text) else json.dumps(text, ensure_ascii=False)
    )


def _data_section(kind: str, data: str) -> str:
    if data == TINY_DATA:
        return (
            f"data:\n  source: {data}\n  options: {{digits: 3}}\n  heldout: 64\n  prompt: {{chat: false}}\n"
        )
    form = {"preferences": "dpo", "examples": "openai"}.get(kind)
    source = "parquet" if data.endswith(".parquet") else "jsonl"
    lines = f"data:\n  source: {source}\n  options:\n    path: {_scalar(data)}\n"
    if form:
        return lines + f"    form: {form}                # others: docs/supervised.md\n  heldout: 16\n"
    return (
        lines
        + "    # question: question      # the columns, where they are called otherwise\n  heldout: 64\n"
    )
