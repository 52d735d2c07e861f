"""Text to ids and back: chat templates, prefilled answers, several end-of-sequence ids.

Knows no model weights and never changes how a model samples.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_schema.images import kind_of, pieces_of
from headrace_schema.sections.generating import ModelSection
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.utils.hub import cached_file

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import load_architecture, location, reading, trusted
from headrace_modelkit.pictures import ImageReader
from headrace_modelkit.processors import load_images
from headrace_modelkit.rendering import RENDERER, Endless

PROCESSOR_TEMPLATE = "chat_template.json"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "\u2581"
"""What SentencePiece writes for a space."""
MARK = "\0"
"""A byte that joins with nothing: behind it a text is as it is behind other text."""
Measure = Callable[[str], int]
MOST_ENDLESS = 3
"""Times that a chat template is killed before it is refused at once."""
ENDLESS = (
    "model.path: the model's chat template comes to no end: {reason}; mend chat_template beside config.json"
)


def _byte_level(piece: str) -> int:
    """Each character of a byte-level piece stands for one byte."""
    return len(piece)


def _sentence_piece(piece: str) -> int:
    return 1 if BYTE.fullmatch(piece) else len(piece.replace(SPACE, " ").encode())


class _Table(dict[int, int]):
    """Bytes by id under one way of writing pieces; each id is looked up once."""

    def __init__(self, tokenizer: Any, known: dict[int, int], measure: Measure) -> None:
        super().__init__(known)
        self._tokenizer, self._measure = tokenizer, measure

    def __missing__(self, key: int) -> int:
        piece = self._tokenizer.convert_ids_to_tokens(key)
        found = self[key] = 0 if piece is None else self._measure(piece)
        return found


class TokenLengths:
    """How many bytes of a decoded text each token of a tokenizer is, by its table: nothing is decoded again."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        # An added token stands for its own text, a special one for none.
        known = {id: 0 if token.special else len(token.content.encode()) for id, token in added.items()}
        known |= dict.fromkeys(tokenizer.all_special_ids, 0)
        self._tables = [_Table(tokenizer, known, measure) for measure in (_byte_level, _sentence_piece)]

    def of(self, ids: Sequence[int], text: str) -> list[int]:
        """Bytes of `text` that each id is: special tokens none. Empty where the pieces do not add up to the text."""
        total = len(text.encode(errors="replace"))
        for table in self._tables:
            lengths = [table[id] for id in ids]
            if sum(lengths) == total:
                return lengths
        return _without_first_space(lengths, total)


def _without_first_space(lengths: list[int], total: int) -> list[int]:
    """SentencePiece leaves out the space that its first piece begins with."""
    first = next((index for index, length in enumerate(lengths) if length), None)
    if first is None or sum(lengths) != total + 1:
        return []
    return [length - (index == first) for index, length in enumerate(lengths)]


class TextCodec:
    """A tokenizer with the ids that end an answer.

    `eos_ids` holds every id that the model, its generation config or its tokenizer calls an end;
    `pad_id` may be one of them, so sequences are masked by length and never by id.
    """

    def __init__(
        self, tokenizer: Any, eos_ids: frozenset[int], pad_id: int, images: ImageReader | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.images = images
        """What reads the images of prompts; None for a model that takes none."""
        self.eos_ids = eos_ids
        self.pad_id = pad_id
        self._endless = 0
        self._lengths = TokenLengths(tokenizer)
        first = tokenizer.convert_ids_to_tokens(self._ids("!", special=False))[:1]
        self._first_space = any(piece.startswith(SPACE) for piece in first)
        """Whether a space is put before every text, as SentencePiece does for Llama 2."""

    def encode_prompt(
        self,
        chat: Sequence[Mapping[str, Any]] | None = None,
        text: str | None = None,
        prefill: str = "",
        arguments: Mapping[str, Any] | None = None,
        images: Sequence[bytes] = (),
    ) -> list[int]:
        """Ids of a prompt: a chat through the template, or text as it is; `prefill` begins the answer.

        `arguments` are given to the template beside the messages. `images` are files, which stand where the messages
        have marks of their kinds; each has as many tokens as the model makes of it.

        The prefill is joined as text before tokenising, so that no token boundary is forced before it.
        Raises ValueError when the tokenizer has no chat template, or both or neither form is given, or images cannot
        be read or placed.
        """
        if (chat is None) == (text is None):
            raise ValueError("a prompt is either a chat or a text")
        if images:
            if self.images is None or chat is None:
                raise ValueError("images need a vision-language model and a chat")
            kinds = set(map(kind_of, images))
            rendered = self.render([in_parts(message, kinds) for message in chat], arguments)
            return self._ids(self.with_images(rendered, images) + prefill, special=False)
        if chat is not None:
            return self._ids(self.render(chat, arguments) + prefill, special=False)
        return self._text_ids(f"{text}{prefill}")

    def with_images(self, rendered: str, images: Sequence[bytes]) -> str:
        """What `render` made, with the tokens of each image in its place. Raises ValueError."""
        if not images:
            return rendered
        assert self.images is not None, "asked before"
        return self.images.expand(rendered, [self.images.read(data) for data in images])

    def encode_answer(self, text: str) -> list[int]:
        """Ids of a reference answer, ended by the tokenizer's own end-of-sequence id."""
        own = self.tokenizer.eos_token_id
        return [*self._ids(text, special=False), own if own is not None else min(self.eos_ids)]

    def encode_behind(self, text: str) -> list[int]:
        """Ids of a text that goes on behind other ids: the tokenizer puts nothing before it, and nothing behind."""
        ids = self._ids(text, special=False)
        if not self._first_space:
            return ids
        mark = self._ids(MARK, special=False)
        marked = self._ids(MARK + text, special=False)
        return marked[len(mark) :] if marked[: len(mark)] == mark else ids

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a text with which `render` begins."""
        return self._ids(text, special=False)

    def through_end(self, turn: str) -> str:
        """A rendered turn up to the last token that ends one; all of it where there is none."""
        ends = [self.decode([id], skip_special_tokens=False) for id in self.eos_ids]
        return turn[: max((turn.rfind(end) + len(end) for end in ends if end in turn), default=len(turn))]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids, for scorers and people; never turned back into ids."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def decode_with_lengths(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Text without special tokens, and how many of its bytes (UTF-8) each id is; none where that is unknown."""
        text = self.decode(ids)
        return text, self.lengths(ids, text)

    def lengths(self, ids: Sequence[int], text: str) -> list[int]:
        """How many bytes of their text ids are; empty where the pieces do not add up to it."""
        return self._lengths.of(ids, text)

    def render(self, chat: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None = None) -> str:
        """The text that the chat template makes of messages; raises ValueError with the template's reason.

        The beginning of the answer follows them, unless `arguments` say otherwise.
        """
        if not self.tokenizer.chat_template:
            raise ValueError(
                "data.prompt.chat: the model's tokenizer has no chat template; set data.prompt.chat: false"
            )
        if self._endless >= MOST_ENDLESS:
            raise Endless(ENDLESS.format(reason=f"it was killed {self._endless} times"))
        given = {**self.tokenizer.special_tokens_map, **(arguments or {})}
        template = self.tokenizer.get_chat_template(tools=given.get("tools"))
        refused: Exception | None = None
        for messages in _written(chat):
            try:
                return RENDERER.render(template, messages, given)
            except Endless as error:
                self._endless += 1
                raise Endless(ENDLESS.format(reason=error)) from error
            except ValueError as error:
                refused = refused or error
        roles = ", ".join(message["role"] for message in chat)
        raise ValueError(f"the model's chat template refuses messages of {roles}: {refused}") from refused

    def _text_ids(self, text: str) -> list[int]:
        """Ids of a text with what the tokenizer puts before it, and not what it puts behind it."""
        plain, decorated = self._ids(text, special=False), self._ids(text, special=True)
        if plain[:1] and plain[0] == decorated[0] == self.tokenizer.bos_token_id:
            return plain  # the text begins with it already
        # Some tokenizers append their end to every text: the answer would begin after an end.
        for start in range(len(decorated) - len(plain) + 1):
            if plain and decorated[start : start + len(plain)] == plain:
                return decorated[: start + len(plain)]
        return [token for token in decorated if token not in self.eos_ids]

    def _ids(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        return ids


def _written(chat: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Messages as they are, and where they have calls of tools with the arguments in the other form.

    Templates want arguments as objects, or as JSON texts: some fail on one, some on the other.
    """
    messages = [dict(message) for message in chat]
    yield messages
    if any(message.get("tool_calls") for message in messages):
        yield [
            {**message, "tool_calls": list(map(_turned, message["tool_calls"]))}
            if isinstance(message.get("tool_calls"), list)
            else message
            for message in messages
        ]


def _turned(call: Any) -> Any:
    """A call whose arguments are a JSON text in place of an object, or an object in place of a text."""
    try:
        given = call["function"]["arguments"]
        turned = json.loads(given) if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": turned}}
    except (TypeError, KeyError, ValueError):
        return call


def in_parts(message: Mapping[str, Any], kinds: Collection[str] = ("image",)) -> dict[str, Any]:
    """A message whose content has a part for each text and each file, as templates of models that read files want.

    `kinds` are those of the prompt's files: other marks are text.
    """
    pieces = pieces_of(message["content"] or "", kinds)
    if len(pieces) == 1:
        return dict(message)
    parts: list[dict[str, str]] = []
    for text, kind in pieces:
        parts += [{"type": "text", "text": text}] if text else []
        parts += [{"type": kind}] if kind else []
    return {**message, "content": parts}


def load_tokenizer(config: ModelSection) -> TextCodec:
    """The model's tokenizer. Raises ModelNotReadable, also when nothing ends an answer."""
    architecture = load_architecture(config)
    with reading(config):
        tokenizer = AutoTokenizer.from_pretrained(config.path, **trusted(config))
    # Without any tokenizer file transformers makes an empty one for some architectures.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelNotReadable(
            f"model.path: {config.path!r} holds no tokenizer; put its tokenizer.json beside config.json"
        )
    # Without tokens that were added to it: models are published with some that they have no embedding of.
    embeddings = int(architecture.get_text_config().vocab_size)
    if tokenizer.vocab_size > embeddings:
        raise ModelNotReadable(
            f"model.path: {config.path!r} has a tokenizer of {tokenizer.vocab_size} tokens and a model of {embeddings} "
            "embeddings; put the tokenizer that the model was trained with beside config.json"
        )
    eos_ids = _eos_ids(tokenizer, architecture, _generation_config(config))
    if not eos_ids:
        raise ModelNotReadable(
            f"model.path: {config.path!r} names no end-of-sequence id; set eos_token in tokenizer_config.json"
        )
    pad_id = tokenizer.pad_token_id
    images = load_images(config)
    if images is not None and not tokenizer.chat_template:
        tokenizer.chat_template = _processor_template(config)
    return TextCodec(tokenizer, eos_ids, pad_id if pad_id is not None else min(eos_ids), images)


def _processor_template(config: ModelSection) -> str | None:
    """The chat template of a vision-language model that was published beside its processor alone."""
    with reading(config):
        found = cached_file(
            config.path, PROCESSOR_TEMPLATE, _raise_exceptions_for_missing_entries=False, **location(config)
        )
        return json.loads(Path(found).read_text()).get("chat_template") if found else None


def _generation_config(config: ModelSection) -> GenerationConfig | None:
    # Read for its end ids alone: temperature and top-p are the run's.
    if config.gguf_file is not None:
        return None
    try:
        return GenerationConfig.from_pretrained(config.path, **location(config))
    except OSError:
        return None


def _eos_ids(
    tokenizer: Any, architecture: PreTrainedConfig, generation: GenerationConfig | None
) -> frozenset[int]:
    named = [tokenizer.eos_token_id, architecture.get_text_config().eos_token_id]
    named.append(generation.eos_token_id if generation is not None else None)
    ids: set[int] = set()
    for entry in named:
        if entry is not None:
            ids.update(entry if isinstance(entry, list) else [entry])
    return frozenset(ids)
