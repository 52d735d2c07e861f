"""Where a request of a session goes on: behind the turn that it extends, with the ids sampled there, or as a branch of
its own.

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

from headrace_rollout.endpoint.requests import ChatRequest, Refusal, TextRequest
from headrace_rollout.engines.samples import Branch, Given, Message
from headrace_rollout.sessions.session import Place, too_many
from headrace_rollout.sessions.template import TurnTemplate, turns_of

if TYPE_CHECKING:
    from headrace_modelkit.tokenizer import TextCodec


@dataclass(frozen=True)
class Mark:
    """Where a branch stood after a turn of the policy: messages, tokens behind the prompt, and the turn's ids."""

    lines: int
    tokens: int
    spoken: Sequence[int]


@dataclass(eq=False)
class RequestedBranch(Branch):
    """Requests of a session that extend each other. `text`: of a text, not of messages.

    `messages` are what was said; `lines` the same as clients send it back, with calls of tools apart from the text.
    """

    messages: list[Message] = field(default_factory=list)
    text: bool = False
    tools: list[dict[str, Any]] | None = None
    lines: list[Message] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    busy: bool = False

    def adds(self, request: ChatRequest, new: Sequence[Message], said: Message, line: Message) -> None:
        """Adds a request's new messages and the turn that answers it, as it was said and as clients send it back."""
        self.messages += [*new, said]
        self.lines += [*new, line]
        self.tools, self.text = request.tools, isinstance(request, TextRequest)
        self.marks.append(Mark(len(self.lines), len(self.tokens), self.spoken))


class Branches:
    """The branches of a session."""

    def __init__(self, codec: TextCodec, template: TurnTemplate) -> None:
        self._codec, self._template = codec, template
        self._branches: list[RequestedBranch] = []

    def place(self, request: ChatRequest) -> Place:
        """Where the request goes on, or begins. Raises ValueError for what the template cannot show."""
        return self._behind(request) or self._anew(request)

    def take(self, place: Place) -> None:
        """Marks its branch as busy, until it is released."""
        assert isinstance(place.branch, RequestedBranch)
        place.branch.busy = True
        if place.branch not in self._branches:
            self._branches.append(place.branch)

    def release(self, place: Place) -> None:
        """Lets others go on with its branch; one that nothing was said in is no more."""
        assert isinstance(place.branch, RequestedBranch)
        place.branch.busy = False
        if not place.branch.marks:
            self._branches.remove(place.branch)

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
            raise Refusal(400, "invalid_request", f"messages: {error.what} {error}", "messages") from error
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
            given = self._template.between(mark.spoken, turns_of(new), request.tools)
        if mark is branch.marks[-1] and not branch.busy:
            return Place(branch, given, new)
        end = len(branch.prompt_ids) + mark.tokens
        images = [image for image in branch.images if image.start < end]
        images += [image.behind(end) for image in given.images]
        read = Given([*branch.prompt_ids, *branch.tokens[: mark.tokens], *given.ids], tuple(images))
        return Place(RequestedBranch(), read, [*branch.lines[: mark.lines], *new])

    def _anew(self, request: ChatRequest) -> Place:
        """A branch of its own, which reads the whole request."""
        if isinstance(request, TextRequest):
            prompt = Given(self._codec.encode_prompt(text=request.prompt))
        else:
            prompt = self._template.opened(turns_of(request.lines), request.tools)
        return Place(RequestedBranch(), prompt, request.lines)


def _common(said: Sequence[Message], lines: Sequence[Message]) -> int:
    """How many first messages are the same."""
    for index, (was, now) in enumerate(zip(said, lines, strict=False)):
        if not was.same(now):
            return index
    return min(len(said), len(lines))


def _new(lines: Sequence[Message], said: Sequence[Message], *, text: bool) -> Sequence[Message]:
    """What a request adds to what was said; nothing where it does not extend it, or puts words into the model's mouth.

    The messages begin with those that were said; of a text this is looked at here.
    """
    if not text:
        new = lines[len(said) :]
        return [] if any(line.role == "assistant" for line in new) else new
    before, (whole,) = "".join(line.content for line in said), lines
    added = whole.content.removeprefix(before)
    return [Message("user", added)] if added and added != whole.content else []
