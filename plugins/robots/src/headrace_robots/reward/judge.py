"""The scorer `picture_judge`: what a frozen vision-language model says of an episode's pictures, yes or no.

Loaded in a scorer's child. One forward pass over a question's tokens, and no text is generated: the score is the
probability of a yes against a no as the first word of the reply.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from headrace_reward.scorers.base import Answer, AnswerFailed, Score, ScorerError
from headrace_reward.scorers.judges.model import compute_device, computing, loading
from headrace_reward.scorers.judges.verdicts import unknown_places
from headrace_schema.images import MARKS
from headrace_servicekit.registry import plugin
from pydantic import Field, PositiveInt, field_validator

from headrace_robots.reward.success import EXTRA, ToldOptions, is_trial, pictures_of

if TYPE_CHECKING:
    from headrace_modelkit.classifier import Seen

INSTRUCTION = "{instruction}"
QUESTION = (
    "The pictures show a robot at work, in the order of time. Its task is: {instruction}\n"
    "Does the last picture show that the task is done? Answer yes or no."
)


class PictureJudgeOptions(ToldOptions):
    """Options of `picture_judge`."""

    path: str = Field(description="Hugging Face id or directory of a vision-language model")
    revision: str | None = Field(default=None, description="commit or tag of the id")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="type of its weights")
    question: str = Field(
        default=QUESTION,
        min_length=1,
        description="what stands behind the pictures; {instruction} is what the episode's task asks for",
    )
    yes: list[str] = Field(
        default_factory=lambda: ["Yes", "yes"],
        min_length=1,
        description="first words of a reply that says yes, of one token each, whose probabilities add up",
    )
    no: list[str] = Field(default_factory=lambda: ["No", "no"], min_length=1, description="the same of no")
    cameras: list[str] = Field(
        default_factory=list,
        description="whose pictures it sees, in this order; none: of all, by their names",
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="given to the chat template, such as enable_thinking: false"
    )
    batch_tokens: PositiveInt = Field(default=16384, description="positions of a batch, padding included")

    @field_validator("question")
    @classmethod
    def _known_places(cls, question: str) -> str:
        if unknown := unknown_places(question, ["instruction"]):
            raise ValueError(f"{{{unknown[0]}}} stands for nothing; write {INSTRUCTION}, or no braces")
        return question


@plugin(PictureJudgeOptions, packages=("torch", "transformers"))
class PictureJudge:
    """Whether an episode's pictures show its success, as a vision-language model says."""

    needs_pictures = one_process = True

    def __init__(self, options: PictureJudgeOptions) -> None:
        self._options = options
        self._device = compute_device(options.threads, EXTRA)
        with loading(self._device):
            from headrace_modelkit.classifier import Viewer

            self._viewer = Viewer.load(options.path, options.revision, options.dtype, self._device)
        self._yes = [self._token("yes", place, word) for place, word in enumerate(options.yes)]
        self._no = [self._token("no", place, word) for place, word in enumerate(options.no)]
        if both := {*self._yes} & {*self._no}:
            word = self._viewer.codec.decode([*both])
            raise ScorerError("options.no", f"{word!r} says yes and no; give words that differ")

    def score_batch(self, answers: Sequence[Answer]) -> list[Score]:
        """A number for each episode; `answered` is how probable it is that the reply begins with any of the words.

        Raises AnswerFailed for an episode that it cannot be asked about, ScorerError where memory is short.
        """
        prompts = [self._prompt(each) for each in answers]
        words, count = [*self._yes, *self._no], len(self._yes)
        with computing(self._device):
            found_BK = self._viewer.log_probs(prompts, words, self._options.batch_tokens)
        yes_B, no_B = found_BK[:, :count].logsumexp(-1), found_BK[:, count:].logsumexp(-1)
        told = zip((yes_B - no_B).sigmoid().tolist(), yes_B.logaddexp(no_B).exp().tolist(), strict=True)
        return [{**self._options.told(yes), "answered": answered} for yes, answered in told]

    def score(self, answer: Answer) -> Score:
        """As `score_batch`, of one episode."""
        return self.score_batch([answer])[0]

    def _prompt(self, answer: Answer) -> Seen:
        """The pictures, those of several cameras behind their names, and the question."""
        cameras, blank = self._options.cameras, np.zeros((1, 32, 32, 3), np.uint8)
        shown: Mapping[str, np.ndarray] = dict.fromkeys(cameras or [""], blank)
        if not is_trial(answer):
            shown = pictures_of(answer, cameras)
        lines = [
            f"{camera}: {MARKS['image'] * len(seen)}" if len(shown) > 1 else MARKS["image"] * len(seen)
            for camera, seen in shown.items()
        ]
        text = "\n".join([*lines, self._asked(answer)])
        files = [_file(camera, picture) for camera, seen in shown.items() for picture in seen]
        try:
            found = self._viewer.prompt(text, files, self._options.arguments)
        except ValueError as error:
            raise AnswerFailed(f"the model cannot be shown the episode: {error}") from error
        if len(found[0]) > self._viewer.longest:
            raise AnswerFailed(
                f"pictures and question have {len(found[0])} tokens, and there is room for the {self._viewer.longest} "
                "of the model's context; lower reward.pictures, or name fewer cameras in options.cameras"
            )
        return found

    def _asked(self, answer: Answer) -> str:
        question, metadata = self._options.question, answer.metadata or {}
        instruction = str(metadata.get("instruction") or "")
        if INSTRUCTION in question and not instruction and not is_trial(answer):
            task = metadata.get("task", "the task")
            reason = (
                f"nothing says in words what {task} asks for; set environment.instructions: {{{task}: …}}"
            )
            raise ScorerError("options.question", f"{reason}, or write the task in place of {INSTRUCTION}")
        return question.replace(INSTRUCTION, instruction)

    def _token(self, field: str, place: int, word: str) -> int:
        """The one token that a word is at the beginning of a reply."""
        codec = self._viewer.codec
        ids = codec.encode_behind(word)
        if len(ids) != 1 or ids[0] == codec.tokenizer.unk_token_id:
            pieces = " ".join(map(repr, codec.tokenizer.convert_ids_to_tokens(ids)))
            reason = (
                f"{word!r} is not one token of this model ({pieces}), and a reply's first token alone is read"
            )
            raise ScorerError(f"options.{field}[{place}]", f"{reason}; give words of one token each")
        return ids[0]


def _file(camera: str, picture: np.ndarray) -> bytes:
    """A picture as a file that loses nothing and costs no compression. Raises AnswerFailed."""
    from PIL import Image

    if picture.shape[-1] not in (1, 3):
        raise AnswerFailed(f"pictures of {camera!r} have {picture.shape[-1]} channels, and 1 or 3 are read")
    file = io.BytesIO()
    Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture).save(file, "BMP")
    return file.getvalue()
