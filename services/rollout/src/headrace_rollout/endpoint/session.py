"""A session whose turns an agent or a client asks for by requests: what they say, and the answers, are kept as ids.

A request whose messages begin with all that was said goes on there; any other begins a branch of its own. Knows no HTTP
and no simulator.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from headrace_servicekit.session_marks import own_key
from headrace_servicekit.tool_arguments import typed
from headrace_servicekit.tool_calls import Call, beside_calls
from typing_extensions import override

from headrace_rollout.endpoint.answers import Answer, Exchange, Exchanges, Terms, Told, all_of, session_over
from headrace_rollout.endpoint.branches import Branches, RequestedBranch
from headrace_rollout.endpoint.requests import ChatRequest, Refusal, canonical
from headrace_rollout.endpoint.streaming import Spelling
from headrace_rollout.engines.samples import Conversation, Finish, Message, SlotKey, TrajectoryUpdate
from headrace_rollout.sessions.session import Limited, Place, Said, Session
from headrace_rollout.sessions.turns import Draw, Heard, Says


class AgentSession(Session):
    """A session behind the endpoint; `talk` has its messages once they are `joined`.

    Its id begins with `mark`. `halted` is set once its sample was stopped, or has what ends the stream.
    """

    def __init__(
        self,
        key: SlotKey,
        attempt: int,
        terms: Terms,
        says: Says,
        *,
        greedy: bool = False,
        most_tokens: int = sys.maxsize,
        mark: str = "",
        secret: str = "",
    ) -> None:
        super().__init__(key, attempt, greedy, most_tokens)
        self.terms, self.player, self._says = terms, says.player, says
        self.id = mark + secrets.token_hex(8)[len(mark) :]
        self.api_key = own_key(secret or secrets.token_urlsafe(32), self.id)
        self.rewarded = False
        self.halted: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        self.halted.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.over = asyncio.Event()
        """Set when requests of a halted session need not wait any longer: nobody waits for their answers."""
        self.answered_at = time.monotonic()
        self.exchanges = Exchanges()
        self._branches = Branches(self.player.codec, self.player.template)
        self._numbers = 0

    @property
    def rewards(self) -> list[float]:
        """Those of the turns, in order."""
        return [turn.reward for turn in self.talk.turns]

    @property
    def finish(self) -> Finish:
        """How it ends if nothing more is asked for."""
        return self.limit or (Finish.LENGTH if self.talk.cut else Finish.TERMINATED)

    async def answer(
        self, request: ChatRequest, *, again: bool = False, key: str = "", told: Told | None = None
    ) -> Sequence[Answer]:
        """The policy's turns, `request.n` of them. Raises Refusal; a stopped sample is not answered until `over`.

        `again`: the client repeats a request whose answer it may not have got; so do requests of one `key`. Cancelled,
        it stops the turns where nobody else waits for them, and nothing of them stays.
        """
        exchange = self.exchanges.repeated(request, key, again=again) or self._begin(request, key, told)
        return await exchange.wait()

    def reward(self, value: float, success: bool | None = None, number: int | None = None) -> None:
        """Adds a reward to a turn, the last one if no number is given. Raises Refusal."""
        if not math.isfinite(value):
            raise Refusal(400, "invalid_request", f"reward: {value} is not finite; give a number", "reward")
        if not self.talk.turns:
            message = "reward: the policy has said nothing yet; send a request first"
            raise Refusal(409, "no_turn", message, "reward")
        named = [turn for turn in self.talk.turns if number in (None, turn.number)]
        if not named:
            raise Refusal(404, "not_found", f"completion: this session has no turn {number}", "completion")
        named[-1].reward += value
        self.talk.success = self.talk.success if success is None else success
        self.rewarded = True

    def join(self) -> Conversation:
        """What was said, branch by branch. Ends requests that are under way."""
        self.exchanges.end()
        spoken = dict.fromkeys(turn.branch for turn in self.talk.turns)
        self.talk.messages = [
            message for one in spoken if isinstance(one, RequestedBranch) for message in one.messages
        ]
        return self.talk

    @override
    def ended(self, finish: Finish, number: int) -> TrajectoryUpdate:
        self.join()
        return super().ended(finish, number)

    @override
    def nothing_learned(self, finish: Finish) -> str:
        if not self.talk.turns and finish is not Finish.PROMPT_TOO_LONG:
            return (
                "the agent spoke to nobody: it has to send requests to OPENAI_BASE_URL, with OPENAI_API_KEY"
            )
        if self.talk.turns and not self.learned:
            return (
                "all its requests set temperature: 0 or top_p below 1, so nothing was drawn that can be learned from: "
                "set agent.sampling: run, with which the run's own sampling holds"
            )
        by_limit = finish not in (Finish.TERMINATED, Finish.LENGTH) or self.limit is not None
        if self.terms.rewards and not self.rewarded and not by_limit:
            return (
                "the agent ended without a reward: return a number, post one to "
                "$OPENAI_BASE_URL/sessions/$HEADRACE_SESSION/reward, or name other scorers in reward.scorers"
            )
        return ""

    def _begin(self, request: ChatRequest, key: str, told: Told | None) -> Exchange:
        """Asks for the turns. Raises Refusal."""
        if self.terms.most_turns and self.exchanges.count >= self.terms.most_turns:
            self.limit = Finish.TRUNCATED
        if self.limit in (Finish.TRUNCATED, Finish.ERROR):
            raise self._over_limit()
        return self.exchanges.begin(request, key, self._answers(request, told))

    async def _answers(self, request: ChatRequest, told: Told | None) -> list[Answer]:
        placed: list[Place] = []
        try:
            draws = self._draws(request)
            await self._branches.see(request)
            for _ in draws:
                placed.append(self._place(request))
            first, self._numbers = self._numbers + 1, self._numbers + len(placed)
            choices = zip(placed, draws, strict=True)
            turns = [
                self._said(place, first + index, draw, partial(told, first, index) if told else None)
                for index, (place, draw) in enumerate(choices)
            ]
            # All of them or none, without a pause: nothing stays of a request that was ended.
            return [self._kept(request, said) for said in await all_of(turns)]
        finally:
            for place in placed:
                self._branches.release(place)

    def _draws(self, request: ChatRequest) -> list[Draw]:
        """How each choice is drawn. Raises Refusal."""
        asked = self.terms.asked and not self.greedy
        drawn = request.drawn_from(self._says.stream.distribution) if asked else None
        seed = request.seed if self.terms.asked else None
        own = Draw(drawn, request.most_tokens, tuple(request.stop or ()))
        return [
            replace(own, seed="" if seed is None else f"{seed}/{index}") for index in range(request.n or 1)
        ]

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
        try:
            self.check(place, self.player)
        except Limited as limited:
            raise self._over_limit() from limited
        self._branches.take(place)
        return place

    async def _said(self, place: Place, number: int, draw: Draw, heard: Heard | None) -> Said:
        """The turn of the policy. Does not return before `over` where the sample was stopped."""
        try:
            return await self.say(place, self._says, number, draw, heard)
        except Refusal:
            raise
        except Limited as limited:
            raise self._over_limit() from limited
        except Exception as error:  # noqa: BLE001  # whoever awaits `halted` handles it
            if not self.halted.done():
                self.halted.set_exception(error)
        # The agent waits: it is ended and begins anew, maybe with another version, when the run goes on.
        await self.over.wait()
        raise session_over()

    def _kept(self, request: ChatRequest, said: Said) -> Answer:
        """Adds a turn that was said; the answer that tells it."""
        branch, update, message = said.place.branch, said.update, self.keep(said)
        assert isinstance(branch, RequestedBranch) and update.whole is not None
        self.answered_at, ids = time.monotonic(), update.whole.token_ids
        content, made = self._called(message.content, request)
        calls = tuple((call.name, canonical(json.dumps(call.arguments))) for call in made)
        branch.adds(request, said.place.messages, message, Message("assistant", content, calls=calls))
        finish = "length" if update.finish is Finish.LENGTH else "tool_calls" if calls else "stop"
        spelled = [b""] * len(ids)
        if request.logprobs:
            spelling = Spelling(self.player.codec)
            spelled = [*spelling.new(ids), *spelling.rest()]
        tokens = tuple(zip(spelled, update.whole.log_probs, strict=True))
        named = tuple(call.id or self._call_id(said.number, at) for at, call in enumerate(made))
        return Answer(said.number, content, calls, finish, len(branch.context) - len(ids), tokens, named)

    def _call_id(self, number: int, at: int) -> str:
        """The id of a call that the policy gave none: nine letters and digits, as Mistral's templates want them."""
        return hashlib.blake2b(f"{self.id}/{number}/{at}".encode()).hexdigest()[:9]

    def _called(self, text: str, request: ChatRequest) -> tuple[str, list[Call]]:
        """The text of a turn, and its calls where the agent has tools. What is no whole call stays text."""
        if not request.tools or request.tool_choice == "none":
            return text, []
        schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in request.tools
        }
        content, calls = beside_calls(self.terms.tool_calls, text, schemas)
        if any(call.problem for call in calls):
            return text, []
        return content, [typed(call, schemas.get(call.name, {})) for call in calls]

    def _over_limit(self) -> Refusal:
        """The refusal that tells of the limit."""
        if self.limit is Finish.TRUNCATED:
            message = (
                f"this session has had its {self.most_tokens} tokens (environment.max_episode_tokens)"
                if self.sampled >= self.most_tokens
                else f"this session has had its {self.terms.most_turns} turns (environment.max_episode_steps)"
            )
            return Refusal(400, "turn_limit", message)
        if self.limit is Finish.ERROR:
            message = "the engine failed on this sample; its agent is started anew"
            return Refusal(500, "engine_failed", message)
        most = self.player.engine.max_context_tokens
        message = f"the messages do not fit the context of {most} tokens (model.max_context)"
        return Refusal(400, "context_length_exceeded", message, "messages")
