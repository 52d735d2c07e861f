"""From messages to ids, turn by turn: a conversation's ids are only ever added to, never made again.

What the chat template puts between two turns is the text behind a stand-in for the policy's turn: that turn's own ids
are those that were sampled. Knows no engine and no environment.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headrace_modelkit.errors import ModelNotReadable
from headrace_schema.images import MARKS, NOUNS, VISION_FAMILIES, Kind, kind_of
from headrace_schema.sections.generating import PromptSection
from headrace_servicekit.image_files import check_image
from headrace_servicekit.rpc.trajectories import chat_turn

from headrace_rollout.engines.samples import Given, Message

if TYPE_CHECKING:
    from headrace_modelkit.pictures import ImageReader
    from headrace_modelkit.tokenizer import TextCodec

Turn = Mapping[str, Any]
"""A message as chat templates take it, with `images`, files, where its content has marks for them."""
BLIND = f"model.path: the model reads no images; name one of {' or '.join(VISION_FAMILIES)}"
"""Why a model without a vision tower takes none."""
STAND_IN = "stand-in 7c1f"
"""What the policy says in what is rendered to see the text around its turns."""
_ASKED: Turn = {"role": "user", "content": "question 7c1f"}
_ANSWER: Turn = {"content": "answer 7c1f", "tool_call_id": "call00100"}
_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object"}},
}
_FOLLOWS: Turn = {"role": "user", "content": "reply 7c1f"}
_PROBES = {"": STAND_IN, " that hold <think> …": f"<think>\nthought 7c1f\n</think>\n\n{STAND_IN}"}


class Rewritten(ValueError):
    """The chat template shows a turn otherwise once another one follows it."""


class TurnTemplate:
    """The chat template of a conversation, or without `prompt.chat` the contents of messages, one behind the other.

    `append`: where the template rewrites earlier turns, what was sampled stays as it was. `blind` says why images are
    not read, where that is so, and `files` what the engine takes where it is not.
    """

    def __init__(
        self,
        codec: TextCodec,
        prompt: PromptSection,
        *,
        append: bool = False,
        blind: str = "",
        files: Collection[Kind] = tuple(MARKS),
    ) -> None:
        self._codec, self._chat, self._append = codec, prompt.chat, append
        if codec.images is None:
            blind = blind or BLIND
        elif not prompt.chat:
            blind = "data.prompt.chat: images are placed by a chat template; set it to true"
        self._blind, self._kinds = blind, files
        self._arguments = dict(prompt.template_arguments)
        self._shown: dict[str, bool] = {}
        """Roles, and whether the template shows what they say."""

    def check(self, *, tools: bool = False) -> None:
        """Raises ModelNotReadable for a template that rewrites earlier turns, unless they are to be appended to.

        `tools`: also for one that shows no answers of tools.
        """
        if not self._chat:
            return
        if tools:
            try:
                self.between((), [{"role": "tool", "name": "probe", **_ANSWER}], [_TOOL])
            except ValueError as error:
                raise ModelNotReadable(
                    f"model.path: a conversation with tools needs a chat template that shows their answers: {error}; "
                    "set the chat_template that the model was published with for tools beside its tokenizer"
                ) from error
        for which, said in _PROBES.items():
            try:
                self._behind([_FOLLOWS], None, said)
            except Rewritten as error:
                raise ModelNotReadable(
                    f"environment.rewritten_turns: the chat template of model.path rewrites earlier turns{which} once "
                    "another one follows, so that the ids of the next turn would not begin with those that were "
                    "sampled; set it to append (the sampled ids stay in the context as they are), or "
                    "data.prompt.template_arguments so that the template keeps them"
                ) from error
            except ValueError as error:
                raise ModelNotReadable(
                    f"environment: a conversation needs turns of user and assistant: {error}"
                ) from error

    async def reads(self, images: Sequence[bytes]) -> None:
        """Checks and reads images in a thread, so that placing them takes nobody's time. Raises ValueError."""
        for data in images:
            reader = self._reader
            if (kind := kind_of(data)) not in self._kinds:
                reason = f"{NOUNS[kind]} is not taken by this engine"
                raise ValueError(f"rollout.engine: {reason}; use the engine transformers")
            await asyncio.to_thread(check_image, data)
            await asyncio.to_thread(reader.read, data)

    @property
    def _reader(self) -> ImageReader:
        reader = self._codec.images
        if self._blind or reader is None:
            raise ValueError(self._blind)
        return reader

    def opened(self, messages: Sequence[Turn], tools: Sequence[Any] | None) -> Given:
        """Ids of the first messages, up to where the policy speaks. Raises ValueError with the template's reason."""
        if not self._chat:
            return self._placed(self._codec.encode_prompt(text=_contents(messages)), messages)
        text = self._codec.render(_rendered(messages), self._given(tools))
        return self._placed(self._codec.encode_rendered(self._with_images(text, messages)), messages)

    def between(self, spoken: Sequence[int], messages: Sequence[Turn], tools: Sequence[Any] | None) -> Given:
        """Ids that follow the policy's turn, which is `spoken`: its end, the messages, the next turn's beginning.

        Raises ValueError with the template's reason, Rewritten where these messages make it rewrite the turn.
        """
        if self._chat:
            text = self._behind(messages, tools, STAND_IN)
            for message in messages:
                self._check_shown(message)
        else:
            text = _contents(messages)
        ids = self._codec.encode_behind(self._with_images(text, messages))
        # The end of the turn is there already where the policy has sampled it.
        ended = bool(spoken) and spoken[-1] in self._codec.eos_ids and ids[:1] == [spoken[-1]]
        return self._placed(ids[1:] if ended else ids, messages)

    def _check_shown(self, message: Turn) -> None:
        """Raises ValueError for a message of a role that the template leaves out."""
        role = message["role"]
        if role not in self._shown:
            probe = {**{key: each for key, each in message.items() if key != "images"}, **_ANSWER}
            self._shown[role] = True
            with suppress(ValueError):  # what came with it was taken
                self._shown[role] = _ANSWER["content"] in self._behind([probe], None, STAND_IN)
        if not self._shown[role]:
            raise ValueError(f"the model's chat template leaves out messages of {role}; give another role")

    def _with_images(self, text: str, messages: Sequence[Turn]) -> str:
        """A text in which each image has its tokens. Raises ValueError."""
        files = _files(messages)
        if not files:
            return text
        reader = self._reader
        return reader.expand(text, [reader.read(data) for data in files])

    def _placed(self, ids: list[int], messages: Sequence[Turn]) -> Given:
        files = _files(messages)
        return Given.of(self._reader, ids, files) if files else Given(ids)

    def _behind(self, messages: Sequence[Turn], tools: Sequence[Any] | None, said: str) -> str:
        """The text that follows what the policy has said."""
        arguments = self._given(tools)
        if (found := self._behind_calls(messages, arguments)) is not None:
            return found
        before = self._codec.render([_ASKED], arguments)
        turns = [_ASKED, {"role": "assistant", "content": said}, *_rendered(messages)]
        whole = self._codec.render(turns, arguments)
        # Some put a blank before a turn, which the policy says by itself.
        turn = whole.removeprefix(before).lstrip()
        if whole.startswith(before) and turn.startswith(said):
            return turn[len(said) :]
        _, found, behind = whole.partition(STAND_IN)
        if self._append and found:
            return behind
        raise Rewritten("it rewrites what stands before the last message")

    def _behind_calls(self, messages: Sequence[Turn], arguments: Mapping[str, Any]) -> str | None:
        """The text that follows a turn that called the tools whose answers come first; None where that is not seen.

        Templates look up the calls that are answered, and refuse answers to none.
        """
        calls = [_called(each) for each in itertools.takewhile(_answers_a_tool, messages)]
        if not calls:
            return None
        for said in (STAND_IN, ""):  # some put what is said behind the answers
            turn: Turn = {"role": "assistant", "content": said, "tool_calls": calls}
            try:
                before = self._codec.render([_ASKED, turn], {**arguments, "add_generation_prompt": False})
                whole = self._codec.render([_ASKED, turn, *_rendered(messages)], arguments)
            except ValueError:
                continue
            end = self._ends(before)
            if whole.startswith(before) and STAND_IN not in end:
                return end + whole[len(before) :]
        return None

    def _ends(self, turn: str) -> str:
        """The end of a rendered turn: from its last token on that ends one."""
        places = [
            turn.rfind(self._codec.decode([id], skip_special_tokens=False)) for id in self._codec.eos_ids
        ]
        return turn[max(places) :] if max(places) >= 0 else ""

    def _given(self, tools: Sequence[Any] | None) -> dict[str, Any]:
        return self._arguments | ({"tools": list(tools)} if tools else {})


def turns_of(messages: Iterable[Message]) -> list[Turn]:
    """Messages as templates take them."""
    return [
        {**chat_turn(each.role, each.content, each.keys_json), "images": each.images} for each in messages
    ]


def _answers_a_tool(message: Turn) -> bool:
    return bool(message["role"] in ("tool", "ipython", "function") and message.get("tool_call_id"))


def _called(answer: Turn) -> dict[str, Any]:
    """The call that a tool has answered."""
    function = {"name": answer.get("name") or "unknown", "arguments": {"said": STAND_IN}}
    return {"id": answer["tool_call_id"], "type": "function", "function": function}


def _rendered(messages: Iterable[Turn]) -> list[dict[str, Any]]:
    """Messages in which images are parts."""
    from headrace_modelkit.tokenizer import in_parts

    found = []
    for each in messages:
        bare = {key: value for key, value in each.items() if key != "images"}
        found.append(in_parts(bare, set(map(kind_of, each.get("images") or ()))))
    return found


def _files(messages: Sequence[Turn]) -> list[bytes]:
    """The images of messages, in order."""
    return [data for message in messages for data in message.get("images", ())]


def _contents(messages: Sequence[Turn]) -> str:
    return "".join(message["content"] or "" for message in messages)
