"""One agent's session with the policy: what its requests say, and the policy's answers, are kept as ids.

A request whose messages begin with all that was said goes on there; any other begins a sibling. Knows no HTTP and no
simulator.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from headrace_servicekit.session_marks import own_key
from headrace_servicekit.tool_calls import Call, typed

from headrace_rollout.conversations.speaker import Asked, Limits
from headrace_rollout.endpoint.answers import Answer, Exchange, Says, Terms, Told, all_of, repeated
from headrace_rollout.endpoint.branches import Branches, Mark, Place, RequestedBranch
from headrace_rollout.endpoint.requests import ChatRequest, Line, Refusal, TextRequest, canonical
from headrace_rollout.endpoint.spelling import Spelling
from headrace_rollout.engines.samples import (
    Conversation,
    Distribution,
    Finish,
    Message,
    SlotKey,
    TrajectoryUpdate,
    Turn,
)

if TYPE_CHECKING:
    pass

REMEMBERED = 256
"""Requests of a session, the last ones, whose answers can be asked for again or named."""


class Session:
    """The session of one sample; `talk` has its branches, turns and messages once they are `joined`.

    Its id begins with `mark`. `limit` says which limit the agent ran into last. `halted` is set once its sample was
    stopped, or has what ends the stream.
    """

    def __init__(
        self,
        key: SlotKey,
        attempt: int,
        talk: Conversation,
        terms: Terms,
        speaker: Says,
        *,
        greedy: bool,
        mark: str = "",
        secret: str = "",
    ) -> None:
        self.id = mark + secrets.token_hex(8)[len(mark) :]
        self.api_key = own_key(secret or secrets.token_urlsafe(32), self.id)
        self.talk = talk
        self.limit: Finish | None = None
        self.cut: RequestedBranch | None = None
        """Whose last turn came to no end by itself, or had no room."""
        self.rewarded = False
        self.halted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.halted.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.over = asyncio.Event()
        """Set when requests of a halted session need not wait any longer: nobody waits for their answers."""
        self._key, self._attempt, self._greedy = key, attempt, greedy
        self._terms, self._speaker = terms, speaker
        self._branches = Branches(terms.codec, terms.template)
        self.answered_at = time.monotonic()
        self._learned = False
        self._requests = self._numbers = 0
        self._asked: deque[Exchange] = deque(maxlen=REMEMBERED)
        self._turns: list[tuple[int, Turn]] = []
        """Number of each turn, in the order of time; its message is that of its branch, until they are joined."""

    @property
    def model(self) -> str:
        """What the policy is called."""
        return self._terms.model

    @property
    def terms(self) -> Terms:
        """What holds for it."""
        return self._terms

    @property
    def answering(self) -> bool:
        """Whether a request is under way."""
        return any(not each.answers.done() for each in self._asked)

    @property
    def turns(self) -> int:
        """Turns that the policy has taken."""
        return len(self._turns)

    @property
    def learned(self) -> bool:
        """Whether anything was drawn that can be learned from."""
        return self._learned

    @property
    def rewards(self) -> list[float]:
        """Those of the turns, in order."""
        return [turn.reward for _, turn in self._turns]

    async def answer(
        self, request: ChatRequest, *, again: bool = False, key: str = "", told: Told | None = None
    ) -> Sequence[Answer]:
        """The policy's turns, `request.n` of them. Raises Refusal; a stopped sample is not answered until `over`.

        `again`: the client repeats a request whose answer it may not have got; so do requests of one `key`. Cancelled,
        it stops the turns where nobody else waits for them, and nothing of them stays.
        """
        exchange = repeated(list(self._asked)[::-1], request, key, again=again) or self._begin(
            request, key, told
        )
        exchange.waiting += 1
        try:
            return await asyncio.shield(exchange.answers)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise _ended() from None  # not whoever asks was ended, but what was asked for
            exchange.lost = exchange.answers.done()
            raise
        finally:
            exchange.waiting -= 1
            if not exchange.waiting and not exchange.answers.done():
                exchange.answers.cancel()
                await asyncio.wait({exchange.answers})

    def _begin(self, request: ChatRequest, key: str, told: Told | None) -> Exchange:
        """Asks for the turns. Raises Refusal."""
        if self._terms.most_turns and self._requests >= self._terms.most_turns:
            self.limit = Finish.TRUNCATED
        if self.limit in (Finish.TRUNCATED, Finish.ERROR):
            raise self._over_limit()
        self._requests += 1
        exchange = Exchange(request, key, asyncio.ensure_future(self._answers(request, told)))
        self._asked.append(exchange)
        exchange.answers.add_done_callback(self._forget_failed)
        return exchange

    def _forget_failed(self, answers: asyncio.Future[list[Answer]]) -> None:
        if answers.cancelled() or answers.exception() is not None:
            self._requests -= 1
            kept = [each for each in self._asked if each.answers is not answers]
            self._asked = deque(kept, maxlen=REMEMBERED)

    def answered(self, number: int) -> tuple[ChatRequest, Answer] | None:
        """A request that was answered with this turn, and the answer; None for one that is not remembered."""
        for each in self._asked:
            answers = each.answers
            if answers.done() and not answers.cancelled() and answers.exception() is None:
                for answer in answers.result():
                    if answer.number == number:
                        return each.request, answer
        return None

    def reward(self, value: float, success: bool | None = None, number: int | None = None) -> None:
        """Adds a reward to a turn, the last one if no number is given. Raises Refusal."""
        if not math.isfinite(value):
            raise Refusal(400, "invalid_request", f"reward: {value} is not finite; give a number", "reward")
        if not self._turns:
            raise Refusal(
                409, "no_turn", "reward: the policy has said nothing yet; send a request first", "reward"
            )
        named = [turn for turn in self._turns if number in (None, turn[0])]
        if not named:
            raise Refusal(404, "not_found", f"completion: this session has no turn {number}", "completion")
        _, rewarded = named[-1]
        rewarded.reward += value
        self.talk.success = self.talk.success if success is None else success
        self.rewarded = True

    def join(self) -> Conversation:
        """The whole session as one trajectory, its branches in the order in which they began.

        Ends requests that are under way.
        """
        for each in self._asked:
            each.answers.cancel()
        talk, branches = self.talk, self._branches.spoken()
        before: dict[int, int] = {}
        for branch in branches:
            before[id(branch)] = len(talk.messages)
            talk.messages += branch.messages
        for _, turn in self._turns:
            talk.turns.append(replace(turn, message=before[id(turn.branch)] + turn.message))
        talk.branches += branches or [self._branches.first]
        talk.cut = self.cut if self.cut in talk.branches else None
        return talk

    async def _answers(self, request: ChatRequest, told: Told | None) -> list[Answer]:
        placed: list[Place] = []
        try:
            drawn = None if self._greedy else self._terms.drawn_from(request)
            await self._branches.see(request)
            for _ in range(request.n or 1):
                placed.append(self._place(request))
            first, self._numbers = self._numbers + 1, self._numbers + len(placed)
            turns = await all_of(
                [
                    self._said(self._asks(request, place, drawn, (first, index), told))
                    for index, place in enumerate(placed)
                ]
            )
            # All of them or none, without a pause: nothing stays of a request that was ended.
            return [
                self._kept(request, place, drawn, first + index, turn)
                for index, (place, turn) in enumerate(zip(placed, turns, strict=True))
            ]
        finally:
            for place in placed:
                place.branch.busy = False

    def _asks(
        self,
        request: ChatRequest,
        place: Place,
        drawn: Distribution | None,
        choice: tuple[int, int],
        told: Told | None,
    ) -> Asked:
        """The turn of a choice: (number of the request's first one, which one it is)."""
        first, index = choice
        seed = f"{request.seed}/{index}" if self._terms.asked and request.seed is not None else ""
        limits = Limits(self._most(request), (*self._terms.stream.stop, *(request.stop or ())))
        return Asked(
            self._key,
            self._attempt,
            first + index - 1,
            place.context,
            self._greedy,
            limits,
            partial(told, *choice) if told else None,
            None,
            drawn,
            seed,
            place.images,
        )

    def _most(self, request: ChatRequest) -> int:
        """The longest that its answer may be."""
        most = self._terms.stream.max_new_tokens
        return min(request.most_tokens or most, most)

    def _kept(
        self,
        request: ChatRequest,
        place: Place,
        drawn: Distribution | None,
        number: int,
        turn: TrajectoryUpdate,
    ) -> Answer:
        """Adds a turn that was said; the answer that tells it."""
        branch, whole = place.branch, turn.whole
        assert whole is not None
        context, most = len(place.context), self._most(request)
        if not branch.marks:
            branch.begins(place.prompt)
        branch.messages += [
            Message(line.role, line.content, line.images, line.keys_json) for line in place.lines
        ]
        branch.gave(place.given)
        text = self._terms.codec.decode(whole.token_ids)
        self._turns.append((number, Turn(len(branch.messages), branch, branch.spoke(whole, drawn))))
        branch.messages.append(Message("assistant", text))
        self._learned |= drawn is None or drawn.whole
        short = len(whole.token_ids) < most  # the context's end has cut it
        cut = turn.finish is Finish.LENGTH and (short or most == self._terms.stream.max_new_tokens)
        self.cut = branch if cut else None
        self.limit, self.answered_at = None, time.monotonic()
        content, made = self._called(text, request)
        calls = tuple((call.name, canonical(json.dumps(call.arguments))) for call in made)
        branch.lines += [*place.lines, Line("assistant", content, calls)]
        branch.tools, branch.text = request.tools, isinstance(request, TextRequest)
        branch.marks.append(Mark(len(branch.lines), len(branch.tokens), whole.token_ids))
        finish = "length" if turn.finish is Finish.LENGTH else "tool_calls" if calls else "stop"
        spelled = [b""] * len(whole.token_ids)
        if request.logprobs:
            spelling = Spelling(self._terms.codec)
            spelled = [*spelling.new(whole.token_ids), *spelling.rest()]
        tokens = tuple(zip(spelled, whole.log_probs, strict=True))
        ids = tuple(call.id or self._call_id(number, at) for at, call in enumerate(made))
        return Answer(number, content, calls, finish, context, tokens, ids)

    def _call_id(self, number: int, at: int) -> str:
        """The id of a call that the policy gave none: nine letters and digits, as Mistral's templates want them."""
        return hashlib.blake2b(f"{self.id}/{number}/{at}".encode()).hexdigest()[:9]

    def _place(self, request: ChatRequest) -> Place:
        """Where the request goes on, or begins; its branch is busy then. Raises Refusal."""
        try:
            place = self._branches.place(request)
        except ValueError as error:
            raise Refusal(400, "invalid_request", f"messages: {error}", "messages") from error
        if not place.context:
            raise Refusal(
                400, "invalid_request", "messages: nothing is said in them; give content", "messages"
            )
        if len(place.context) >= self._terms.most_tokens:
            if not self._turns:
                self._branches.first.begins(place.prompt)
            self.limit = Finish.LENGTH if self._turns else Finish.PROMPT_TOO_LONG
            self.cut = place.branch
            raise self._over_limit()
        self._branches.take(place)
        return place

    async def _said(self, asked: Asked) -> TrajectoryUpdate:
        """The turn of the policy. Does not return before `over` where the sample was stopped."""
        try:
            turn = await self._speaker.say(asked)
        except Refusal:
            raise
        except Exception as error:  # noqa: BLE001  # whoever awaits `halted` handles it
            self._halt(error)
        else:
            if turn.finish in (Finish.ERROR, Finish.PROMPT_TOO_LONG):
                if not self._turns:
                    self._branches.first.prompt_ids = turn.prompt_ids
                self.limit = turn.finish
                raise self._over_limit()
            if not turn.stopped and turn.finish is not None and self._terms.stream.holds():
                return turn
            self._halt(None)
        # The agent waits: it is ended and begins anew, maybe with another version, when the run goes on.
        await self.over.wait()
        raise _ended()

    def _halt(self, error: Exception | None) -> None:
        if not self.halted.done():
            self.halted.set_exception(error) if error is not None else self.halted.set_result(None)

    def _called(self, text: str, request: ChatRequest) -> tuple[str, list[Call]]:
        """The text of a turn, and its calls where the agent has tools. What is no whole call stays text."""
        if not request.tools or request.tool_choice == "none":
            return text, []
        schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in request.tools
        }
        content, calls = self._terms.calls_of(text, schemas)
        if any(call.problem for call in calls):
            return text, []
        return content, [typed(call, schemas.get(call.name, {})) for call in calls]

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


def _ended() -> Refusal:
    return Refusal(503, "session_over", "this session has ended; an agent's begins anew")
