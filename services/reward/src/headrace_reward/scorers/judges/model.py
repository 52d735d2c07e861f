"""Reward models: classifiers of transformers, in the scorer's own process; of whole answers, or of their beginnings.

And what each scorer needs that holds a model: its device, and what to say where the model does not load or compute.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from headrace_servicekit.registry import Options, plugin
from pydantic import Field, NonNegativeInt, PositiveInt

from headrace_reward.scorers.base import BLANK, Answer, AnswerFailed, Score, ScorerError

if TYPE_CHECKING:
    from headrace_modelkit.classifier import Classifier

_EXTRA = "reward_model needs its extra: pip install 'headrace-reward[model]'"
_PROBE = Answer(prompt="1 + 1?", completion="2")


class RewardModelOptions(Options):
    """Options of `reward_model`."""

    path: str = Field(
        description="Hugging Face id or directory of a …ForSequenceClassification or …ForTokenClassification model"
    )
    by: Literal["answer", "turn", "gain", "step"] = Field(
        "answer",
        description="what the model judges. answer: the whole. turn: what was said up to the end of each of the "
        "policy's turns, which is that turn's reward. gain: the same, and a turn's reward is what it adds to the one "
        "before. step: the answer up to the end of each step; the score is the least",
    )
    separator: str = Field("\n\n", min_length=1, description="by: step: what ends a step")
    revision: str | None = Field(None, description="commit or tag of the id")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="type of its weights")
    batch_tokens: PositiveInt = Field(16384, description="positions of a batch, padding included")
    threads: PositiveInt = Field(1, description="of the computation on the CPU")
    label: NonNegativeInt | None = Field(
        None, description="of a model with several labels: the one whose probability is the score"
    )
    sigmoid: bool = Field(False, description="of a model with one label: put its logit between 0 and 1")


@plugin(RewardModelOptions, packages=("torch", "transformers"))
class RewardModel:
    """What a reward model (a sequence classifier) says of question and answer, in its chat template."""

    one_process = True

    def __init__(self, options: RewardModelOptions) -> None:
        self._options = options
        self._device = compute_device(options.threads, _EXTRA)
        with loading(self._device):
            from headrace_modelkit.classifier import Classifier

            self._model: Classifier = Classifier.load(
                options.path, options.revision, options.dtype, self._device
            )
        several = self._model.labels > 1
        if several and (options.label is None or options.label >= self._model.labels):
            names = self._model.model.config.id2label
            listed = ", ".join(f"{number}: {names.get(number, '?')}" for number in range(self._model.labels))
            raise ScorerError(
                "options.label", f"the model has the labels {listed}; give one of these numbers"
            )
        if not several and options.label is not None:
            raise ScorerError(
                "options.label", "the model has one label, whose logit is the score; leave it out"
            )
        if several and options.sigmoid:
            raise ScorerError("options.sigmoid", "the model has several labels; leave it out")

    def score_batch(self, answers: Sequence[Answer]) -> list[Score]:
        """What each answer is worth, and its turns. Raises ScorerError where memory is short."""
        texts = [self._beginnings(_PROBE if answer == BLANK else answer) for answer in answers]
        values = iter(self._values([ids for several in texts for ids in several]))
        return [self._score([next(values) for _ in several]) for several in texts]

    def _score(self, values: Sequence[float]) -> Score:
        """The score of what the beginnings of an answer are worth."""
        if self._options.by in ("answer", "step"):
            return min(values)
        before = [0.0, *values[:-1]] if self._options.by == "gain" else [0.0] * len(values)
        turns = [value - earlier for value, earlier in zip(values, before, strict=True)]
        return {"turns": turns}

    def _values(self, ids: Sequence[list[int]]) -> list[float]:
        """The logit of each text, or the probability of its label."""
        import torch

        options = self._options
        with computing(self._device):
            logits_BL = self._model.logits(ids, options.batch_tokens)
        if options.label is not None:
            found = torch.softmax(logits_BL, -1)[:, options.label]
        else:
            found = torch.sigmoid(logits_BL[:, 0]) if options.sigmoid else logits_BL[:, 0]
        return [float(each) for each in found]

    def score(self, answer: Answer) -> Score:
        """As `score_batch`, of one answer."""
        return self.score_batch([answer])[0]

    def _beginnings(self, answer: Answer) -> list[list[int]]:
        """What the model reads of an answer: all of it, or up to the end of each turn or step, the whole last."""
        turns = [{key: each for key, each in turn.items() if key != "party"} for turn in answer.messages]
        if answer.episode is None:  # else the messages hold all that was said
            turns = turns or [{"role": "user", "content": answer.prompt}]
            turns.append({"role": "assistant", "content": answer.completion})
        by, ends = self._options.by, [len(turns)]
        if by in ("turn", "gain") and answer.episode is not None:
            said = [place + 1 for place, turn in enumerate(turns) if turn["role"] == "assistant"]
            ends = said[-len(answer.episode["rewards"]) :]  # those before are of the first messages
        found = [turns[:end] for end in ends]
        if by == "step":
            separator, last = self._options.separator, turns[-1]
            parts = last["content"].split(separator)
            steps = [
                separator.join(parts[: count + 1]) for count in range(len(parts)) if parts[count].strip()
            ]
            found = [[*turns[:-1], {**last, "content": step}] for step in steps or [last["content"]]]
        return [self._ids(each) for each in found]

    def _ids(self, turns: Sequence[dict[str, str]]) -> list[int]:
        """Question and answer as the model reads them. Raises AnswerFailed where it has no room for them."""
        tokenizer = self._model.tokenizer
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode("".join(turn["content"] for turn in turns))
        if not ids:
            raise ValueError("the answer and its question have no tokens")
        if len(ids) > self._model.longest:
            room = f"{self._model.longest} tokens of the reward model's context"
            raise AnswerFailed(
                f"question and answer have {len(ids)} tokens, and there is room for the {room}"
            )
        return ids


def compute_device(threads: int, extra: str) -> str:
    """The GPU of the lease that this process was started under; without one the CPU, with so many threads.

    Raises ScorerError: what `extra` brings is not installed, or torch reaches no GPU.
    """
    if any(find_spec(package) is None for package in ("torch", "headrace_modelkit")):
        raise ScorerError("name", extra)
    import torch

    torch.set_num_threads(threads)
    device = "cuda:0" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu"
    if device != "cpu" and not torch.cuda.is_available():
        reason = (
            "the reward service has a GPU's lease, and torch reaches none there; install torch with CUDA, or "
        )
        raise ScorerError("name", f"{reason}name CPU slots in placement.reward")
    return device


@contextmanager
def loading(device: str) -> Iterator[None]:
    """Raises ScorerError for a model of `options.path` that cannot be read, or for which there is no room."""
    from headrace_modelkit.errors import ModelNotReadable

    try:
        yield
    except ModelNotReadable as error:
        raise ScorerError("options.path", str(error).removeprefix("model.path: ")) from error
    except (MemoryError, RuntimeError, OSError) as error:
        raise ScorerError("options.path", _no_room(device, str(error))) from error


@contextmanager
def computing(device: str) -> Iterator[None]:
    """Raises ScorerError for a batch for which there is no memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = f"the model cannot be computed on {device}: {str(error)[:200]}; lower batch_tokens"
        raise ScorerError("options.batch_tokens", reason) from error


def _no_room(device: str, said: str) -> str:
    """What to do where a model does not load."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    held = (
        "" if limit == resource.RLIM_INFINITY else f" (limit of this process: {math.ceil(limit / 2**30)} GiB)"
    )
    fix = (
        "name a larger GPU in placement.reward, or dtype: bfloat16"
        if device != "cpu"
        else "give HEADRACE_REWARD_MEMORY_BYTES more, or dtype: bfloat16"
    )
    return f"the model does not load on {device}: {said[:200]}{held}; {fix}"
