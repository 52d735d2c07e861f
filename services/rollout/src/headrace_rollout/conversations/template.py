"""From messages to ids, turn by turn: a conversation's ids are only ever added to, never made again.

What the chat template puts between two turns is the text behind a stand-in for the policy's turn: that turn's own ids
are those that were sampled. Knows no engine and no environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace_modelkit.errors import ModelNotReadable
from headrace_schema.images import VISION_FAMILIES
from headrace_schema.sections.generating import PromptSection
from headrace_servicekit.image_files import check_image

from headrace_rollout.conversations.conversation import Given
from headrace_rollout.engines.samples import Message

if TYPE_CHECKING:
    from headrace_modelkit.tokenizer import TextCodec
    from headrace_modelkit.vision import ImageReader

Turn = Mapping[str, Any]
"""A message as chat templates take it, with `images`, files, where its content has marks for them."""
BLIND = f"model.path: the model reads no images; name one of {' or '.join(VISION_FAMILIES)}"
"""Why a model without a vision tower takes none."""
STAND_IN = "stand-in 7c1f"
"""What the policy says in what is rendered to see the text around its turns."""
_ASKED: Turn = {"role": "user", "content": "question 7c1f"}
_FOLLOWS: Turn = {"role": "user", "content": "reply 7c1f"}
_PROBES = {
    "": STAND_IN,
    " that hold <think> …": f"<think>\nthought 7c1f\n</think>\n\n{STAND_IN}",
}


class Rewritten(ValueError):
    """The chat template shows a turn otherwise once another one follows it."""


class TurnTemplate:
    """The chat template of a conversation, or without `prompt.chat` the contents of messages, one behind the other.

    `append`: where the template rewrites earlier turns, what was sampled stays as it was. `blind` says why images are
    not read, where that is so.
    """

    def __init__(
        self, codec: TextCodec, prompt: PromptSection, *, append: bool = False, blind: str = ""
    ) -> None:
        self._codec, self._chat, self._append = codec, prompt.chat, append
        if codec.images is None:
            blind = blind or BLIND
        elif not prompt.chat:
            blind = "data.prompt.chat: images are placed by a chat template; set it to true"
        self._blind = blind
        self._arguments = dict(prompt.template_arguments)

    def check(self) -> None:
        """Raises ModelNotReadable for a template that rewrites earlier turns, unless they are to be appended to."""
        if not self._chat:
            return
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
        ids = self._codec.encode_prompt(chat=_rendered(messages), arguments=self._given(tools))
        return self._placed(ids, messages)

    def between(self, spoken: Sequence[int], messages: Sequence[Turn], tools: Sequence[Any] | None) -> Given:
        """Ids that follow the policy's turn, which is `spoken`: its end, the messages, the next turn's beginning.

        Raises ValueError with the template's reason, Rewritten where these messages make it rewrite the turn.
        """
        text = self._behind(messages, tools, STAND_IN) if self._chat else _contents(messages)
        ids = self._codec.encode_behind(text)
        # The end of the turn is there already where the policy has sampled it.
        ended = bool(spoken) and spoken[-1] in self._codec.eos_ids and ids[:1] == [spoken[-1]]
        return self._placed(ids[1:] if ended else ids, messages)

    def _placed(self, ids: list[int], messages: Sequence[Turn]) -> Given:
        """Ids in which each image has its tokens. Raises ValueError."""
        files = [data for message in messages for data in message.get("images", ())]
        if not files:
            return Given(ids)
        reader = self._reader
        return Given.of(reader, reader.expand(ids, [reader.read(data) for data in files]), files)

    def _behind(self, messages: Sequence[Turn], tools: Sequence[Any] | None, said: str) -> str:
        """The text that follows what the policy has said."""
        arguments = self._given(tools)
        before = self._codec.render([_ASKED], arguments) + said
        turns = [_ASKED, {"role": "assistant", "content": said}, *_rendered(messages)]
        whole = self._codec.render(turns, arguments)
        if whole.startswith(before):
            return whole[len(before) :]
        _, found, behind = whole.partition(STAND_IN)
        if self._append and found:
            return behind
        raise Rewritten("it rewrites what stands before the last message")

    def _given(self, tools: Sequence[Any] | None) -> dict[str, Any]:
        return self._arguments | ({"tools": list(tools)} if tools else {})


def turns_of(messages: Iterable[Message]) -> list[Turn]:
    """Messages as templates take them."""
    return [{"role": each.role, "content": each.content, "images": each.images} for each in messages]


def _rendered(messages: Iterable[Turn]) -> list[dict[str, Any]]:
    """Messages in which images are parts."""
    from headrace_modelkit.tokenizer import in_parts

    found = []
    for each in messages:
        bare = {key: value for key, value in each.items() if key != "images"}
        found.append(in_parts(bare) if each.get("images") else bare)
    return found


def _contents(messages: Sequence[Turn]) -> str:
    return "".join(message["content"] for message in messages)
