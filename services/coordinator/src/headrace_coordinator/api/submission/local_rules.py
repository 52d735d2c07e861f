"""What no instance mends: a spec's model directory, data, trackers, the run that it forks, the suite that it asks.

Reads local model directories; everything else has been read into the submission.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from headrace_schema.model_size import text_config
from headrace_schema.openings import role_model
from headrace_schema.problems import Impossible, choose, nearest, problem
from headrace_schema.resources.views import KeyProblemView, RunView
from headrace_schema.rules.environments import no_policy_directory
from headrace_schema.sections.generating import ModelSection, dividing_sizes
from headrace_schema.spec import RunSpec
from headrace_schema.stores import is_remote

from headrace_coordinator.api.submission.submission import Submission
from headrace_coordinator.data.dataset import WARMUP_BYTES, Dataset

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
PRESETS = ("smollm2", "tiny", "tiny_vision")
"""Models that a command makes; the examples name their directories so."""
MOST_ANSWERS = 2**20
WEIGHT_SUFFIXES = (".safetensors", ".gguf")
BATCH_SHAPE = ("group_size", "prompts_per_step")
"""Keys of `algorithm` that say which prompts a step has: with others, step N would not begin where the origin ended."""


def models(submission: Submission) -> Iterator[KeyProblemView]:
    """Directories of models that are not there, or hold none."""
    spec = submission.spec
    yield from _policy_directory(spec.model) if spec.trains_robots else ()
    yield from _model_directory(spec.model, "model.path")
    if spec.trainer.reference:
        yield from _model_directory(spec.trainer.reference, "trainer.reference.path")
    for name, role in spec.environment.roles.items() if spec.environment else ():
        if role.path:
            yield from _model_directory(role_model(spec.model, role), f"environment.roles.{name}.path")
    for name, policy in spec.policies.items():
        if policy.model is not None:
            yield from _model_directory(policy.model, f"policies.{name}.model.path")
    drafts = spec.rollout.engine_options.get("speculative")
    others = {
        "algorithm.options.critic_path": spec.algorithm.options.get("critic_path"),
        "trainer.draft.path": spec.trainer.draft.path if spec.trainer.draft else None,
        "rollout.engine_options.speculative.model": drafts.get("model") if isinstance(drafts, dict) else None,
    }
    for key, path in others.items():
        if isinstance(path, str) and path:
            yield from _model_directory(ModelSection(path=path), key)


def engine_model(submission: Submission) -> Iterator[KeyProblemView]:
    """GPUs that cannot divide a local model's attention heads, and a model that drafts with other words than it has."""
    model, given = submission.spec.model, submission.spec.rollout.engine_options
    path, config = model.path, text_config(model)
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    size = given.get("tensor_parallel_size")
    if type(size) is int and size > 0 and type(heads) is int and heads > 0:
        keys = shared if type(shared) is int and shared > 0 else heads
        if size not in (valid := dividing_sizes(heads, keys)):
            reason = f"{size} devices cannot divide {heads} attention heads ({keys} of keys and values)"
            fix = f"set one of {', '.join(map(str, valid))}"
            yield problem("rollout.engine_options.tensor_parallel_size", reason, fix)
    speculative, words = given.get("speculative"), config.get("vocab_size")
    draft = speculative.get("model") if isinstance(speculative, dict) else None
    drafted = text_config(ModelSection(path=str(draft))).get("vocab_size") if draft else None
    if words is not None and drafted is not None and words != drafted:
        reason = f"{draft} has a vocabulary of {drafted} tokens and {path} one of {words}"
        fix = "name a model of the same family, or set method: ngram"
        yield problem("rollout.engine_options.speculative.model", reason, fix)


def data(submission: Submission) -> Iterator[KeyProblemView]:
    """Why the data cannot be read, and what its items lack."""
    spec, opened = submission.spec, submission.data
    if isinstance(opened, Impossible):
        yield from opened.problems
        return
    assert opened is not None
    if spec.evaluation.baseline_prefill is not None:
        try:
            opened.check_template(spec.evaluation.baseline_prefill, "evaluation.baseline_prefill")
        except Impossible as error:
            yield from error.problems
            return
    answers = not spec.acts_in_environments and spec.trainer.warmup.steps
    if answers and (unanswered := opened.unanswered()):
        reason = f"{unanswered} of {opened.train_size} training items have no answer to learn from"
        yield problem(
            "trainer.warmup.steps", reason, "give every item an answer, or set trainer.warmup.steps: 0"
        )
    elif answers and opened.warmup.size > WARMUP_BYTES:
        reason = (
            f"the {opened.train_size} training items have {opened.warmup.size / 1e6:.0f} MB as examples, and trainers "
            f"are told {WARMUP_BYTES / 1e6:.0f} MB at most"
        )
        fix = "leave out long items (data.options.longest_question), or set trainer.warmup.steps: 0"
        yield problem("trainer.warmup.steps", reason, fix)


def answers(submission: Submission) -> Iterator[KeyProblemView]:
    """More items than a suite has, and more answers of one evaluation than the coordinator keeps in hand."""
    data, spec = submission.data, submission.spec
    if not isinstance(data, Dataset):
        return
    if submission.evaluated is not None:
        items, limit = data.asked_size, submission.evaluated.asked.suite.limit
        samples, key = submission.evaluated.asked.samples, "samples"
        if limit is not None and limit > items:
            yield problem(
                "suite.limit", f"the suite has {items} items", f"the nearest valid value is {items}"
            )
        items = min(limit or items, items)
    else:
        items = max((len(data.of_kind(kind)[1]) for kind in data.evaluated), default=0)
        samples, key = spec.evaluation.samples, "evaluation.samples"
    if items * samples > MOST_ANSWERS:
        reason = (
            f"{samples:,} answers to {items:,} items are more than the {MOST_ANSWERS:,} of one evaluation"
        )
        yield problem(key, reason, f"use at most {max(1, MOST_ANSWERS // items)}, or fewer items")


def fork(submission: Submission) -> Iterator[KeyProblemView]:
    """Why a spec cannot continue from the checkpoint of another run that it names.

    Model and optimizer are the trainer's to compare, when it reads the checkpoint.
    """
    spec, origin = submission.spec, submission.origin
    if spec.from_checkpoint is None or origin is None:
        return
    wanted = spec.from_checkpoint.step
    if origin.run is None:
        yield origin.unknown("from_checkpoint.run")
        return
    if not origin.steps:
        if origin.saving and wanted is None:
            yield from _batch_shape(spec, origin.run)
            return
        reason = f"run {origin.name} has no checkpoint"
        yield problem("from_checkpoint.run", reason, _how_to_get_one(origin.run))
        return
    yield from _batch_shape(spec, origin.run)
    if wanted is not None and wanted not in origin.steps:
        yield origin.no_checkpoint_of("from_checkpoint.step", wanted)
        return
    start = origin.steps[0] if wanted is None else wanted
    if spec.steps <= start:
        earlier = sorted({step for step in origin.steps if step < spec.steps})
        instead = f", or an earlier checkpoint: {', '.join(map(str, earlier))}" if earlier else ""
        reason = f"{spec.steps} steps leave nothing to do after the checkpoint of step {start}"
        yield problem("steps", reason, f"the nearest valid value is {start + 1}{instead}")


def _batch_shape(spec: RunSpec, origin: RunView) -> list[KeyProblemView]:
    return [
        problem(
            f"algorithm.{key}",
            f"{mine} is not the {theirs} of run {origin.id}, so its steps would have other prompts",
            f"set it to {theirs}",
        )
        for key in BATCH_SHAPE
        if (mine := getattr(spec.algorithm, key)) != (theirs := origin.spec["algorithm"][key])
    ]


def _how_to_get_one(origin: RunView) -> str:
    if origin.ended:
        return "name a run that has one"
    return f"wait until it has one, or make one with: headrace run pause {origin.id}"


def _model_directory(model: ModelSection, key: str) -> Iterator[KeyProblemView]:
    if model.policy is not None:
        return  # A new robot policy: the services that build it say what is wrong with it.
    if is_remote(model.path):
        return  # `stores` has looked there.
    given, file = model.path, model.gguf_file
    path = Path(given)
    gguf_key = key.replace("path", "gguf_file")
    if given.startswith("~"):
        fix = "write the whole path; headrace run submit does so by itself"
        yield problem(key, f"{given!r} is another directory for each user that a service runs as", fix)
        return
    try:
        local = given.startswith(("./", "../", "/")) or path.exists()
        if not local:
            if not HUB_ID.fullmatch(given):
                reason = f"there is no directory {given!r}, and that is no Hugging Face id (owner/name)"
                yield problem(key, reason, _neighbour(path))
        elif not path.is_dir():
            what = "is a file, not a directory" if path.exists() else "does not exist"
            yield problem(key, f"{given} {what}", _neighbour(path))
        elif file is not None:
            if not (path / file).is_file():
                files = [entry.name for entry in path.glob("*.gguf")]
                yield problem(gguf_key, f"{given} holds no file {file}", choose(file, files))
        elif not _holds_a_model(path):
            yield _incomplete(path, given, key, gguf_key)
    except (OSError, ValueError) as error:
        yield problem(key, f"{given!r} cannot be read: {error}", "name a readable directory")


def _policy_directory(model: ModelSection) -> Iterator[KeyProblemView]:
    """An id of a hub, and a language model's directory, which hold no robot policy."""
    path = Path(model.path)
    if not model.path or model.path.startswith("~"):
        return
    if HUB_ID.fullmatch(model.path) and not path.exists():
        yield no_policy_directory(model.path)
    elif path.is_dir() and _holds_a_model(path) and not (path / "policy.json").is_file():
        reason = f"{path} holds no robot policy: it has no policy.json"
        fix = "convert a published checkpoint: python -m headrace_robots.convert"
        yield problem("model.path", reason, fix)


def _holds_a_model(path: Path) -> bool:
    if (path / "policy.json").is_file():
        return (path / "model.safetensors").is_file()
    return (path / "config.json").is_file() and any(
        entry.suffix in WEIGHT_SUFFIXES or entry.name.endswith(".safetensors.index.json")
        for entry in path.iterdir()
    )


def _incomplete(path: Path, given: str, key: str, gguf_key: str) -> KeyProblemView:
    gguf = sorted(entry.name for entry in path.glob("*.gguf"))
    if gguf:
        return problem(gguf_key, f"{given} holds GGUF weights", f"set {gguf_key}: {gguf[0]}")
    missing = "safetensors weights" if (path / "config.json").is_file() else "config.json"
    reason = f"{given} is no model directory: it has no {missing}"
    inside = sorted(entry.parent.name for entry in path.glob("*/config.json"))
    fix = f"did you mean {path / inside[0]}?" if inside else "name a directory in Hugging Face format"
    return problem(key, reason, fix)


def _neighbour(path: Path) -> str:
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    close = nearest(path.name, names) if folder == path.parent else None
    if path.name in PRESETS:
        return f"make it: python -m headrace_modelkit.presets.{path.name} {path}"
    if close:
        return f"did you mean {folder / close}?"
    return f"name a directory that the coordinator's host has; the nearest that exists is {folder}"
