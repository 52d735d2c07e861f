"""One agent's conversation with the policy: each request must extend what was said, and its answer is kept as ids.

Knows no HTTP and no simulator.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace_rollout.conversations.conversation import Conversation
from headrace_rollout.conversations.speaker import Asked, Limits, Speaker
from headrace_rollout.conversations.template import TurnTemplate
from headrace_rollout.endpoint.requests import ChatRequest, Line, Refusal, TextRequest, canonical, chat_of
from headrace_rollout.engines.samples import Finish, SlotKey, Stream, TrajectoryUpdate

if TYPE_CHECKING:
    from headrace_modelkit.tokenizer import TextCodec
    from headrace_servicekit.tool_calls import Call

ONE_CONVERSATION = (
    "a session is one conversation: send all earlier messages as they were said, and new ones behind them"
)


@dataclass(frozen=True)
class Terms:
    """What holds for all sessions of a stream; `most_turns` 0 is no limit, `most_tokens` is the context's."""

    model: str
    stream: Stream
    codec: TextCodec
    template: TurnTemplate
    most_turns: int
    most_tokens: int
    calls_of: Callable[[str], tuple[str, list[Call]]]
    """The text of a turn beside its calls, and these."""


@dataclass(frozen=True)
class Answer:
    """A turn of the policy as an agent gets it; `tokens` are (text, log-prob) of each."""

    number: int
    content: str
    calls: tuple[tuple[str, str], ...]
    finish: str
    prompt_tokens: int
    tokens: tuple[tuple[str, float], ...]


class Session:
    """The session of one sample; `talk` is filled as it goes on.

    `limit` says which limit the agent ran into. `halted` is set once its sample was stopped, or has what ends the
    stream.
    """

    def __init__(
        self,
        key: SlotKey,
        attempt: int,
        talk: Conversation,
        terms: Terms,
        speaker: Speaker,
        check_opening: Callable[[Sequence[int]], None],
        *,
        greedy: bool,
    ) -> None:
        self.id, self.api_key = secrets.token_hex(8), f"sk-headrace-{secrets.token_urlsafe(32)}"
        self.talk = talk
        self.limit: Finish | None = None
        self.cut = False
        """The last turn came to no end by itself."""
        self.rewarded = False
        self.halted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.halted.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.over = asyncio.Event()
        """Set when requests of a halted session need not wait any longer: nobody waits for their answers."""
        self._key, self._attempt, self._greedy = key, attempt, greedy
        self._terms, self._speaker, self._check_opening = terms, speaker, check_opening
        self._busy = False
        self._lines: list[Line] = []
        self._tools: list[dict[str, Any]] | None = None
        self._spoken: Sequence[int] = ()
        self._last: tuple[ChatRequest, Answer] | None = None

    @property
    def last(self) -> tuple[ChatRequest, Answer] | None:
        """The last request that was answered, and its answer."""
        return self._last

    @property
    def model(self) -> str:
        """What the policy is called."""
        return self._terms.model

    async def answer(self, request: ChatRequest, *, again: bool = False) -> Answer:
        """The policy's turn. Raises Refusal; a stopped sample is not answered until `over`.

        `again`: the client repeats a request whose answer it may not have got.
        """
        if self._busy:
            message = f"another request of this session is under way, and {ONE_CONVERSATION}"
            raise Refusal(409, "session_busy", message)
        if again and self._last is not None and self._last[0] == request:
            return self._last[1]
        if self._terms.most_turns and self.talk.turns == self._terms.most_turns:
            self.limit = Finish.TRUNCATED
        if self.limit is not None:
            raise self._over_limit()
        self._busy = True
        try:
            return await self._turn(request)
        finally:
            self._busy = False

    def reward(self, value: float, success: bool | None = None) -> None:
        """Adds a reward to the last turn. Raises Refusal."""
        if not math.isfinite(value):
            raise Refusal(400, "invalid_request", f"reward: {value} is not finite; give a number", "reward")
        if not self.talk.rewards:
            raise Refusal(
                409, "no_turn", "reward: the policy has said nothing yet; send a request first", "reward"
            )
        self.talk.rewards[-1] += value
        self.talk.success = self.talk.success if success is None else success
        self.rewarded = True

    async def _turn(self, request: ChatRequest) -> Answer:
        talk, stream, lines = self.talk, self._terms.stream, self._all_lines(request)
        first = not self._lines
        try:
            prompt, given = self._ids(request, lines)
        except ValueError as error:
            raise Refusal(400, "invalid_request", f"messages: {error}", "messages") from error
        context = [*prompt, *talk.tokens, *given]
        if len(context) >= self._terms.most_tokens:
            talk.prompt_ids = prompt
            self.limit = Finish.PROMPT_TOO_LONG if first else Finish.LENGTH
            raise self._over_limit()
        most = min(request.most_tokens or stream.max_new_tokens, stream.max_new_tokens)
        limits = Limits(most, (*stream.stop, *(request.stop or ())))
        asked = Asked(self._key, self._attempt, talk.turns, context, self._greedy, limits)
        turn = await self._said(asked)
        whole = turn.whole
        assert whole is not None
        talk.prompt_ids = prompt
        talk.said += [(line.role, line.content) for line in lines[len(self._lines) :]]
        talk.gave(given)
        text = self._terms.codec.decode(whole.token_ids)
        talk.spoke(whole, text)
        talk.rewards.append(0.0)
        short = len(whole.token_ids) < most  # the context's end has cut it
        self.cut = turn.finish is Finish.LENGTH and (short or most == stream.max_new_tokens)
        content, calls = self._called(text, request)
        self._lines = [*lines, Line("assistant", content, calls)]
        self._tools, self._spoken = request.tools, whole.token_ids
        finish = "length" if turn.finish is Finish.LENGTH else "tool_calls" if calls else "stop"
        decode = self._terms.codec.decode
        tokens = tuple(
            (decode([id]) if request.logprobs else "", value)
            for id, value in zip(whole.token_ids, whole.log_probs, strict=True)
        )
        answer = Answer(talk.turns, content, calls, finish, len(context), tokens)
        self._last = request, answer
        return answer

    def _ids(self, request: ChatRequest, lines: Sequence[Line]) -> tuple[Sequence[int], list[int]]:
        """The prompt, and what follows the policy's last turn. Raises Refusal, and ValueError of the template."""
        template = self._terms.template
        if not self._lines:
            if isinstance(request, TextRequest):
                prompt: Sequence[int] = self._terms.codec.encode_prompt(text=request.prompt)
            else:
                prompt = template.opened(chat_of(lines), request.tools)
            try:
                self._check_opening(prompt)
            except Exception as error:
                self._halt(error)
                raise Refusal(400, "invalid_request", str(error), "messages") from error
            return prompt, []
        if (request.tools or None) != (self._tools or None):
            message = "tools: they differ from those of the first request, which the prompt begins with; give the same"
            raise Refusal(400, "not_extended", message, "tools")
        new = self._behind(lines)
        if isinstance(request, TextRequest):
            return self.talk.prompt_ids, self._terms.codec.encode_behind(new[0].content)
        return self.talk.prompt_ids, template.between(self._spoken, chat_of(new), request.tools)

    def _all_lines(self, request: ChatRequest) -> Sequence[Line]:
        """The messages of a request; of a text, what was said and then what it adds. Raises Refusal."""
        text = isinstance(request, TextRequest)
        if self._last is not None and isinstance(self._last[0], TextRequest) != text:
            message = "chat completions and completions of a text are told apart: go on as the session began"
            raise Refusal(400, "not_extended", message)
        if not isinstance(request, TextRequest) or not self._lines:
            return request.lines
        said = "".join(line.content for line in self._lines)
        if not request.prompt.startswith(said) or request.prompt == said:
            message = "prompt: it does not begin with the last prompt and its answer, or adds nothing to them"
            raise Refusal(400, "not_extended", f"{message}; {ONE_CONVERSATION}", "prompt")
        return [*self._lines, Line("user", request.prompt[len(said) :])]

    def _behind(self, lines: Sequence[Line]) -> Sequence[Line]:
        """The new messages of a request; Refusal where it does not extend what was said."""
        for index, (was, now) in enumerate(zip(self._lines, lines, strict=False)):
            if not was.same(now):
                message = f"messages.{index}: it is not what was said ({_shown(was)}); {ONE_CONVERSATION}"
                raise Refusal(400, "not_extended", message, f"messages.{index}")
        known = len(self._lines)
        if len(lines) <= known:
            reason = f"{len(lines)} messages where {known} were said, the model's last turn among them"
            raise Refusal(400, "not_extended", f"messages: {reason}; {ONE_CONVERSATION}", "messages")
        for index, line in enumerate(lines[known:], known):
            if line.role == "assistant":
                message = f"messages.{index}: the model has not said this; only its own turns are assistant messages"
                raise Refusal(400, "not_extended", message, f"messages.{index}")
        return lines[known:]

    async def _said(self, asked: Asked) -> TrajectoryUpdate:
        """The turn of the policy. Does not return before `over` where the sample was stopped."""
        try:
            turn = await self._speaker.say(asked)
        except Exception as error:  # noqa: BLE001  # whoever awaits `halted` handles it
            self._halt(error)
        else:
            if turn.finish in (Finish.ERROR, Finish.PROMPT_TOO_LONG):
                self.talk.prompt_ids, self.limit = turn.prompt_ids, turn.finish
                raise self._over_limit()
            if not turn.stopped and turn.finish is not None and self._terms.stream.holds():
                return turn
            self._halt(None)
        # The agent waits: it is ended and begins anew, maybe with another version, when the run goes on.
        await self.over.wait()
        raise Refusal(503, "session_over", "this session was stopped; its agent is started anew")

    def _halt(self, error: Exception | None) -> None:
        if not self.halted.done():
            self.halted.set_exception(error) if error is not None else self.halted.set_result(None)

    def _called(self, text: str, request: ChatRequest) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The text of a turn, and its calls where the agent has tools. What is no whole call stays text."""
        if not request.tools or request.tool_choice == "none":
            return text, ()
        content, calls = self._terms.calls_of(text)
        if any(call.problem for call in calls):
            return text, ()
        return content, tuple((call.name, canonical(json.dumps(call.arguments))) for call in calls)

    def _over_limit(self) -> Refusal:
        most = self._terms.most_tokens
        if self.limit is Finish.TRUNCATED:
            return Refusal(
                400,
                "turn_limit",
                f"this session has had its {self._terms.most_turns} turns (environment.max_episode_steps)",
            )
        if self.limit is Finish.ERROR:
            return Refusal(
                500, "engine_failed", "the engine failed on this sample; its agent is started anew"
            )
        message = f"the messages do not fit the context of {most} tokens (model.max_context)"
        return Refusal(400, "context_length_exceeded", message, "messages")


def _shown(line: Line) -> str:
    text = line.content if len(line.content) <= 60 else f"{line.content[:60]}…"
    return f"{line.role}: {text!r}" + (f" and {len(line.calls)} calls" if line.calls else "")
