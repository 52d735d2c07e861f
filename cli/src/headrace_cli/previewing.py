"""What `headrace data` and `headrace reward` do with the services' own code, in this process, without a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_cli.errors import EXIT_USER_ERROR, CommandError, user_error

if TYPE_CHECKING:
    from headrace_coordinator.data.dataset import Dataset
    from headrace_schema.spec import RunSpec


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
    if find_spec("headrace_modelkit") is None or not Path(spec.model.path).expanduser().is_dir():
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
