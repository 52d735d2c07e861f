"""Where a request of a session goes on: behind the turn that it extends, with the ids sampled there, or as a sibling.

Knows no HTTP, no engine and no simulator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace_modelkit.rendering import Endless
from headrace_servicekit.image_files import BadImage

from headrace_rollout.conversations.conversation import BranchUnderWay, Given, too_many
from headrace_rollout.conversations.template import TurnTemplate
from headrace_rollout.endpoint.requests import ChatRequest, Line, Refusal, TextRequest, chat_of
from headrace_rollout.engines.samples import ImageAt, Message

if TYPE_CHECKING:
    from headrace_modelkit.tokenizer import TextCodec


@dataclass(frozen=True)
class Mark:
    """Where a branch stood after a turn of the policy: messages, tokens behind the prompt, and the turn's ids."""

    lines: int
    tokens: int
    spoken: Sequence[int]


@dataclass(eq=False)
class RequestedBranch(BranchUnderWay):
    """Requests of a session that extend each other. `text`: of a text, not of messages."""

    messages: list[Message] = field(default_factory=list)
    text: bool = False
    tools: list[dict[str, Any]] | None = None
    lines: list[Line] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    busy: bool = False


@dataclass(frozen=True)
class Place:
    """Where a turn goes: the branch, what was read before, what is read now, and the messages that are new."""

    branch: RequestedBranch
    prompt: Given
    given: Given
    lines: Sequence[Line]

    @property
    def context(self) -> list[int]:
        """What the policy reads."""
        return [*self.prompt.ids, *self.branch.tokens, *self.given.ids]

    @property
    def images(self) -> tuple[ImageAt, ...]:
        """Those of the context."""
        known = self.branch.images if self.branch.marks else self.prompt.images
        before = len(self.prompt.ids) + len(self.branch.tokens)
        return (*known, *(image.behind(before) for image in self.given.images))


class Branches:
    """The branches of a session, `first` among them."""

    def __init__(self, codec: TextCodec, template: TurnTemplate) -> None:
        self._codec, self._template = codec, template
        self.first = RequestedBranch()
        self._branches = [self.first]

    def place(self, request: ChatRequest) -> Place:
        """Where the request goes on, or begins. Raises ValueError for what the template cannot show."""
        return self._behind(request) or self._anew(request)

    def take(self, place: Place) -> None:
        """Marks its branch as busy, until whoever takes it is done."""
        place.branch.busy = True
        if place.branch not in self._branches:
            self._branches.append(place.branch)

    def spoken(self) -> list[RequestedBranch]:
        """Those in which the policy has spoken, in the order in which they began."""
        return [branch for branch in self._branches if branch.marks]

    async def see(self, request: ChatRequest) -> None:
        """Reads the images of a request before it is placed. Raises Refusal."""
        images = [image for line in request.lines for image in line.images]
        try:
            if many := too_many(images, *(each.data for one in self._branches for each in one.images)):
                raise ValueError(many)
            await self._template.reads(images)
            with suppress(ValueError):  # which placing it raises again
                await asyncio.to_thread(self._rehearse, request)
        except BadImage as error:
            raise Refusal(400, "invalid_request", f"messages: an image {error}", "messages") from error
        except ValueError as error:
            raise Refusal(400, "unsupported_parameter", f"messages: {error}", "messages") from error

    def _rehearse(self, request: ChatRequest) -> None:
        """Renders the request's text, which is kept: placing it takes nobody's time then. Raises Refusal."""
        try:
            self.place(request)
        except Endless as error:
            raise Refusal(400, "invalid_request", f"messages: {error}", "messages") from error

    def _behind(self, request: ChatRequest) -> Place | None:
        """Behind the turn that the request extends, with the ids that were sampled; None: it extends none."""
        text, most = isinstance(request, TextRequest), 0
        lines, found = request.lines, None
        for branch in self._branches:
            if branch.text != text or (request.tools or None) != (branch.tools or None):
                continue
            known = len(branch.lines) if text else _common(branch.lines, lines)
            for mark in reversed(branch.marks):
                if most < mark.lines <= known and (new := _new(lines, branch.lines[: mark.lines], text=text)):
                    found, most = (branch, mark, new), mark.lines
                    break
        if found is None:
            return None
        branch, mark, new = found
        if text:
            given = Given(self._codec.encode_behind(new[0].content))
        else:
            given = self._template.between(mark.spoken, chat_of(new), request.tools)
        if mark is branch.marks[-1] and not branch.busy:
            return Place(branch, Given(branch.prompt_ids), given, new)
        end = len(branch.prompt_ids) + mark.tokens
        images = [image for image in branch.images if image.start < end]
        images += [image.behind(end) for image in given.images]
        read = Given([*branch.prompt_ids, *branch.tokens[: mark.tokens], *given.ids], tuple(images))
        before = branch.lines[: mark.lines]
        return Place(RequestedBranch(), read, Given(()), [*before, *new])

    def _anew(self, request: ChatRequest) -> Place:
        """A branch of its own, which reads the whole request: the first one, or a sibling."""
        if isinstance(request, TextRequest):
            prompt = Given(self._codec.encode_prompt(text=request.prompt))
        else:
            prompt = self._template.opened(chat_of(request.lines), request.tools)
        branch = RequestedBranch() if self.first.marks or self.first.busy else self.first
        return Place(branch, prompt, Given(()), request.lines)


def _common(said: Sequence[Line], lines: Sequence[Line]) -> int:
    """How many first messages are the same."""
    for index, (was, now) in enumerate(zip(said, lines, strict=False)):
        if not was.same(now):
            return index
    return min(len(said), len(lines))


def _new(lines: Sequence[Line], said: Sequence[Line], *, text: bool) -> Sequence[Line]:
    """What a request adds to what was said; nothing where it does not extend it, or puts words into the model's mouth.

    The messages begin with those that were said; of a text this is looked at here.
    """
    if not text:
        new = lines[len(said) :]
        return [] if any(line.role == "assistant" for line in new) else new
    before, (whole,) = "".join(line.content for line in said), lines
    added = whole.content.removeprefix(before)
    return [Line("user", added)] if added and added != whole.content else []
