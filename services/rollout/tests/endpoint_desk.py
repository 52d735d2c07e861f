"""An endpoint for tests, without a network and without a model: its policy says what it is told to."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

from headrace_rollout.endpoint.answers import Terms
from headrace_rollout.endpoint.server import Endpoint
from headrace_rollout.endpoint.session import AgentSession
from headrace_rollout.engines.samples import Distribution, Finish, Prefix, SlotKey, Stream, TrajectoryUpdate
from headrace_rollout.sessions.template import TurnTemplate
from headrace_rollout.sessions.turns import Player
from headrace_schema.sections.generating import PromptSection

END = 0
CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
STREAM = Stream(3, Distribution(), 40, 7, lambda _: None, lambda _: None, stop=("#",))
CALL = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'


def user(text):
    """A question."""
    return {"role": "user", "content": text}


class Letters:
    """A codec in which each character is an id, and 0 ends a turn."""

    eos_ids = frozenset({END})
    images = None
    tokenizer = SimpleNamespace(
        encode=lambda text, add_special_tokens: [END if c == "\0" else ord(c) for c in text]
    )

    def render(self, chat, arguments=None):
        tools = f"[{len(arguments['tools'])} tools]" if (arguments or {}).get("tools") else ""
        said = "".join(f"{m['role'][0]}:{m['content']}{'+' * len(m.get('tool_calls', ()))}\0" for m in chat)
        return f"{tools}{said}a:"

    def encode_prompt(self, chat=None, text=None, arguments=None):
        text = self.render(chat, arguments) if text is None else f"^{text}"
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode_rendered(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    encode_behind = encode_rendered

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(id) for id in ids if id != END)


def policy(codec=None, most_tokens=400):
    """Who takes turns, in a context of so many tokens."""
    codec = codec or Letters()
    engine = SimpleNamespace(max_context_tokens=most_tokens)
    return Player(engine, codec, TurnTemplate(codec, PromptSection(chat=True)))


class Says:
    """Says what it is told to, and keeps what it was asked."""

    def __init__(self, *texts, player=None, stream=None):
        self.player, self.stream = player, stream or STREAM
        self.texts, self.asked, self.waits, self.stopped = list(texts), [], asyncio.Event(), 0
        self.waits.set()

    async def say(self, asked):
        self.asked.append(asked)
        try:
            await self.waits.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        text = self.texts.pop(0)
        if isinstance(text, Exception):
            raise text
        if text is None:
            return TrajectoryUpdate(
                asked.key, asked.attempt, 0, [], [], 3, [], stopped=True, whole=Prefix([], [], [])
            )
        ids = [*map(ord, text), END]
        finish = Finish.EOS
        if len(ids) > (most := asked.draw.most_tokens(self.stream)):
            ids, finish = ids[:most], Finish.LENGTH
        for id in ids[:-1] if asked.heard else ():
            asked.heard([id], [-0.5])
            await asyncio.sleep(0)
        whole = Prefix(ids, [-0.5] * len(ids), [(3, len(ids))])
        return TrajectoryUpdate(
            asked.key, asked.attempt, 0, ids, whole.log_probs, 3, [], finish=finish, whole=whole
        )


class Desk:
    """An endpoint with sessions, and a client of it."""

    def __init__(self):
        self.endpoint, self.client = Endpoint("127.0.0.1", "127.0.0.1"), None

    def open(self, *texts, codec=None, most_tokens=200, **more):
        # A stream of its own, which a test may change.
        speaker = Says(*texts, player=policy(codec, most_tokens), stream=replace(STREAM))
        session = AgentSession(SlotKey(1, 2), 1, Terms("run", "hermes", **more), speaker)
        self.endpoint._sessions[session.id] = session
        return session, speaker

    async def post(self, session, body, path=CHAT, **headers):
        headers = {"Authorization": f"Bearer {session.api_key}", **headers}
        content = body if isinstance(body, bytes) else json.dumps(body)
        return await self.client.post(path, content=content, headers=headers)

    async def said(self, session, messages, **more):
        found = await self.post(session, {"model": "x", "messages": messages, **more})
        assert found.status_code == 200, found.text
        return found.json()["choices"][0]

    async def refused(self, session, body, status=400, path=CHAT, **headers):
        found = await self.post(session, body, path, **headers)
        assert found.status_code == status, found.text
        error = found.json()["error"]
        assert {"message", "type", "param", "code"} == set(error)
        return error
