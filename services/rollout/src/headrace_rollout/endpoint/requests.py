"""What an agent asks for in a chat completion, checked: what would change the policy's answers otherwise is refused.

Knows no session and no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from headrace_schema.images import MANY, MARKS, NOUNS, PARTS, kind_of, marks_in
from headrace_servicekit.image_files import BadImage, file_of
from headrace_servicekit.rpc.trajectories import keys_of
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from headrace_rollout.engines.samples import Distribution, Message

MOST_CHOICES = 128
TEXTS = ("text", "input_text", "output_text")
FILES = {name: kind for name, kind in PARTS.items() if name.endswith("_url") or name.startswith("input_")}
"""Types of parts that are files, as data URLs; `input_audio` has base64."""
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 100.0
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
}
"""What else some servers let a request say of how tokens are drawn, and the values that change nothing."""


IGNORED = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Keys of OpenAI's that change no answer: how requests are billed, kept and cached, and whose they are."""
_FORMED = "answers are not formed by it; leave it out"
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "modalities": ((["text"], []), "the policy says text alone; leave it out"),
    "audio": ((), "the policy says text alone; leave it out"),
    "function_call": (("auto", "none"), "give tools and tool_choice"),
    "reasoning_effort": (
        (),
        "a chat template reads it for the whole run: data.prompt.template_arguments: {reasoning_effort: …}; "
        "leave it out here",
    ),
    "verbosity": (("medium",), _FORMED),
    "web_search_options": ((), "give tools, and answer their calls"),
    "max_tool_calls": ((), _FORMED),
    "truncation": (("disabled",), "nothing is left out of a request; give disabled, or leave it out"),
    "ignore_eos": ((False,), _FORMED),
    "min_tokens": ((0,), _FORMED),
}
"""Keys that would change answers, which the policy's are not: values that change nothing, and what to do instead."""
_UNKNOWN = "keys that change no answer are metadata, user, store and the like; leave it out"


class Refusal(Exception):
    """A request that is answered with an error: HTTP status, code and message, and the parameter that it is about."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param


class _Part(BaseModel):
    type: str
    text: str = ""
    image_url: str | _Address | None = None
    video_url: str | _Address | None = None
    audio_url: str | _Address | None = None
    input_audio: _Sound | None = None

    @property
    def image(self) -> bytes:
        """The file of a part that is one. Raises BadImage."""
        kind = FILES[self.type]
        given = getattr(self, f"{kind}_url") or self.input_audio
        if isinstance(given, _Sound):
            given = f"data:audio/{given.format};base64,{given.data}"
        try:
            data = file_of((given.url if isinstance(given, _Address) else given) or "")
        except BadImage as error:
            raise BadImage(error.reason, error.fix, NOUNS[kind]) from error
        if (own := kind_of(data)) != kind:
            raise BadImage(f"that is {NOUNS[own]} by its first bytes", f"give it as {own}", NOUNS[kind])
        return data


class _Address(BaseModel):
    url: str


class _Sound(BaseModel):
    data: str
    format: str = "wav"


class _Function(BaseModel):
    name: str
    arguments: str = "{}"


class _Call(BaseModel):
    id: str | None = None
    function: _Function


class ChatMessage(BaseModel):
    """One message, with all keys that it has: chat templates read some of them."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def keys(self, tools: Mapping[str, str]) -> dict[str, Any]:
        """The keys beside role and content that say something; `tools` are the names of those called, by id."""
        keys = {key: each for key, each in (self.model_extra or {}).items() if each not in (None, "", [], {})}
        if name := self.name or tools.get(self.tool_call_id or ""):
            keys["name"] = name
        if self.tool_call_id:
            keys["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            keys["tool_calls"] = [
                {"type": "function", "function": {"name": each.name, "arguments": _object(each.arguments)}}
                | ({"id": call.id} if call.id else {})
                for call in self.tool_calls
                if (each := call.function)
            ]
        return keys

    def line(self, tools: Mapping[str, str] = MappingProxyType({})) -> Message:
        """For comparisons."""
        parts = (
            [_Part(type="text", text=self.content)] if isinstance(self.content, str) else self.content or []
        )
        text = "".join(MARKS[FILES[part.type]] if part.type in FILES else part.text for part in parts)
        images = tuple(part.image for part in parts if part.type in FILES)
        calls = tuple(
            (each.function.name, canonical(each.function.arguments)) for each in self.tool_calls or ()
        )
        keys = keys_of(self.keys(tools))
        role = "system" if self.role == "developer" else self.role
        return Message(role, text, images, keys, calls=calls)


class _Tool(BaseModel):
    """As it is told to the chat template; what else it says is let through."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: _ToolFunction


class _ToolFunction(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    parameters: dict[str, Any] | None = None


class _Format(BaseModel):
    type: str


class _StreamOptions(BaseModel):
    include_usage: bool | None = False


class ChatRequest(BaseModel):
    """The body of POST /v1/chat/completions; keys that are not named here are looked at by `_unread`."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: list[str] | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    temperature: float | None = Field(default=None, ge=0, le=MOST_TEMPERATURE)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    response_format: _Format | None = None
    logit_bias: dict[str, float] | None = None
    functions: list[Any] | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("tools")
    @classmethod
    def _callable(cls, given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Refuses what is no function with a name; kept as it was given."""
        TypeAdapter(list[_Tool]).validate_python(given or [])
        return given

    @field_validator("stop", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @property
    def lines(self) -> list[Message]:
        """The messages for comparisons."""
        found, tools = list[Message](), dict[str, str]()
        for message in self.messages:
            found.append(message.line(tools))
            tools |= {call.id: call.function.name for call in message.tool_calls or () if call.id}
        return found

    @property
    def most_tokens(self) -> int | None:
        """The longest answer that is asked for."""
        given = [each for each in (self.max_tokens, self.max_completion_tokens) if each is not None]
        return min(given, default=None)

    @property
    def unforced(self) -> dict[str, str]:
        """Keys that ask for a form into which nothing forces an answer, and what to do instead."""
        wanted = {
            "response_format": self.response_format is not None
            and self.response_format.type != "text"
            and "answers are not forced into a form; leave it out, and let the reward ask for it",
            "tool_choice": self.tool_choice not in (None, "auto", "none")
            and "a call is not forced; give auto or none",
            "parallel_tool_calls": self.parallel_tool_calls is False
            and bool(self.tools)
            and self.tool_choice != "none"
            and "a turn of the policy may have several calls, and none is left out; leave it out, and answer each",
        }
        return {key: reason for key, reason in wanted.items() if reason}

    def drawn_from(self, otherwise: Distribution) -> Distribution | None:
        """What its tokens are to be drawn from; None where it is `otherwise`. Raises Refusal for what there is not."""
        for key, neutral in _NEUTRAL.items():
            if (given := getattr(self, key)) is not None and given not in neutral:
                reason = "requests have temperature, top_p and seed; leave it out, or set agent.sampling: run"
                raise Refusal(400, "unsupported_parameter", f"{key}: {reason}", key)
        temperature = otherwise.temperature if self.temperature is None else self.temperature
        if 0 < temperature < LEAST_TEMPERATURE:
            reason = f"{temperature:g} is neither 0 nor at least {LEAST_TEMPERATURE}"
            raise Refusal(400, "invalid_request", f"temperature: {reason}; give one of these", "temperature")
        found = replace(otherwise, temperature=temperature, top_p=self.top_p or otherwise.top_p)
        return None if found == otherwise else found


class TextRequest(ChatRequest):
    """A request for the rest of a text, which is its only message: as it is, without a chat template."""

    @property
    def prompt(self) -> str:
        """The whole text so far."""
        return self.lines[0].content


def read_request(body: bytes) -> ChatRequest:
    """The request of a body. Raises Refusal 400 with the key and what to do."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(map(str, first["loc"])) or None
        raise Refusal(400, "invalid_request", f"{param or 'the body'}: {first['msg']}", param) from error
    for index, message in enumerate(request.messages):
        parts = message.content if isinstance(message.content, list) else ()
        if other := next((part.type for part in parts if part.type not in (*TEXTS, *FILES)), None):
            why = f"a part of type {other} is neither text, image, video nor audio, and these alone are read"
            raise Refusal(400, "unsupported_parameter", f"messages.{index}.content: {why}", "messages")
        if any(part.type in FILES for part in parts):
            _check_images(message, f"messages.{index}.content")
    wrong = {
        "logit_bias": bool(request.logit_bias) and "answers are drawn from the policy as it is; leave it out",
        "functions": bool(request.functions) and "give tools",
        "top_logprobs": bool(request.top_logprobs)
        and "only the log-prob of what was sampled is kept; give 0",
        "stop": any(not text for text in request.stop or ()) and "a stop text is empty; leave it out",
    }
    for param, reason in (wrong | _unread(request)).items():
        if reason:
            raise Refusal(400, "unsupported_parameter", f"{param}: {reason}", param)
    return request


def _unread(request: ChatRequest) -> dict[str, str]:
    """What is wrong with the keys that are not read: those that would change answers, and those that nobody knows."""
    found = {}
    for key, given in (request.model_extra or {}).items():
        neutral, fix = NEUTRAL.get(key, ((), f"this endpoint does not know it; {_UNKNOWN}"))
        if key not in IGNORED and given is not None and given not in neutral:
            found[key] = fix
    for index, message in enumerate(request.messages):
        keys = message.keys({})
        if lost := next((key for key in ("audio", "function_call") if key in keys), None):
            found[f"messages.{index}.{lost}"] = "it is not read; give content and tool_calls"
    return found


def _check_images(message: ChatMessage, where: str) -> None:
    """Raises Refusal for images that are no data, and for a text that has their mark."""
    try:
        line = message.line()
    except BadImage as error:
        raise Refusal(400, "invalid_request", f"{where}: {error.what} {error}", "messages") from error
    if message.role == "assistant":
        why = "the policy says no images; give them in messages of other roles"
        raise Refusal(400, "invalid_request", f"{where}: {why}", "messages")
    if len(marks := marks_in(line.content, {kind_of(data) for data in line.images})) != len(line.images):
        shown = MARKS[marks[0]]
        why = f"the text {shown} stands for {NOUNS[marks[0]]}; write it otherwise beside {MANY[marks[0]]}"
        raise Refusal(400, "invalid_request", f"{where}: {why}", "messages")


def canonical(arguments: str | Mapping[str, Any]) -> str:
    """Arguments of a call in one form, whatever the order of keys and the blanks; what is no JSON stays as it is."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return str(arguments)
    return json.dumps(found, sort_keys=True)


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
