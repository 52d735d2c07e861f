"""A conversation in which the model may call tools until it answers: `environment.tasks: [tools]`.

One of them searches texts of one's own, by BM25 (https://github.com/xhluca/bm25s).
"""

from __future__ import annotations

import ast
import json
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from headrace_schema.text_files import numbered_lines
from headrace_servicekit.registry import Options
from headrace_servicekit.sandbox.run import POLICY, NotHeld, Policy, require_walls, run_programs
from headrace_servicekit.sandbox.run import Limits as SandboxLimits
from headrace_servicekit.tool_calls import beside_calls
from pydantic import Field, PositiveFloat, PositiveInt

from headrace_simulator.backends.base import BackendError, Message
from headrace_simulator.backends.base import Tool as ToolSchema
from headrace_simulator.backends.conversation.calls import AnyTool, Limits, ServiceLost, Tool, answers
from headrace_simulator.backends.conversation.services import ServerOptions, service_of
from headrace_simulator.backends.options import require, unknown
from headrace_simulator.backends.user_file import is_user_environment, load_factory


class SearchOptions(Options):
    """What is searched."""

    corpus: Path = Field(description="a .jsonl file with one text a line, or a folder that bm25s has saved")
    text: str = Field("text", description="the key of a line's text")
    results: PositiveInt = Field(3, description="texts of an answer")
    longest: PositiveInt = Field(1000, description="characters of each text that are shown")


def search_tool(options: SearchOptions) -> Callable[[str], str]:
    """The function `search`; ValueError where the corpus cannot be read."""
    index, texts = _index(options.corpus.resolve(), options.text)

    def search(query: str) -> str:
        """Searches for texts that are about the words of the query."""
        import bm25s

        asked = bm25s.tokenize([query], show_progress=False)
        if not asked.vocab:
            return "nothing was found"
        count = min(options.results, len(texts))
        found, scores = index.retrieve(asked, k=count, show_progress=False, n_threads=1)
        pairs = zip(found[0], scores[0], strict=True)
        shown = [f"[{int(row)}] {texts[int(row)][: options.longest]}" for row, score in pairs if score > 0]
        return "\n\n".join(shown) or "nothing was found"

    return search


@lru_cache(maxsize=4)
def _index(corpus: Path, key: str) -> tuple[Any, list[str]]:
    """Made once in a process, as its conversations share it."""
    import bm25s

    if corpus.is_dir():
        index = bm25s.BM25.load(corpus, load_corpus=True)
        return index, [str(each[key] if isinstance(each, dict) else each) for each in index.corpus or []]
    if not corpus.is_file():
        raise ValueError(f"there is no file {corpus}; paths start where the service does")
    texts = []
    for number, line in numbered_lines(corpus):
        try:
            row = json.loads(line)
            texts.append(row if isinstance(row, str) else str(row[key]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{corpus}:{number} is no JSON with a key {key!r}") from error
    if not texts:
        raise ValueError(f"{corpus} is empty")
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    return index, texts


LARGEST_BITS = 4096
"""Of a whole number that the calculator makes."""
LONGEST_EXPRESSION = 1000
OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class ToolOptions(Options):
    """Options of `tools`."""

    tools: list[str] = Field(
        default_factory=lambda: ["calculator"],
        description="built-in tools (calculator, python, search), and functions as path/to/file.py:function",
    )
    mcp: list[ServerOptions] = Field(
        default_factory=list, description="MCP servers, whose tools the model gets too"
    )
    search: SearchOptions | None = Field(None, description="what the tool search searches")
    python_memory_mib: PositiveInt = Field(512, description="memory of the code that the tool python runs")
    sandbox: Policy = Field("required", description=f"of the tool python; {POLICY}")
    parser: Literal["hermes", "json", "llama3", "mistral", "qwen3_coder", "glm"] = Field(
        "hermes",
        description="form of calls: hermes (Hermes, Qwen 2.5, Qwen 3), qwen3_coder (Qwen3-Coder, Qwen 3.5 and later, "
        "Nemotron 3), glm (GLM-4.5 and later), llama3, mistral, or json (a JSON object alone)",
    )
    system: str = Field("", description="system message that the conversation begins with")
    deadline_s: PositiveFloat = Field(5.0, description="seconds that the calls of one turn may take together")
    most_calls: PositiveInt = Field(8, description="calls of one turn that are answered")
    most_characters: PositiveInt = Field(4000, description="characters of an answer that are kept")
    images: bool = Field(
        default=False,
        description="the model sees images that tools answer with (images of Pillow, image blocks of MCP servers); "
        "without it it reads [image]",
    )


class ToolConversation:
    """A question, calls with their answers, and the turn without a call, which ends it.

    It gives no reward: scorers judge the last turn, and may read the calls in `messages`.
    """

    def __init__(self, options: ToolOptions) -> None:
        self._options = options
        made: list[AnyTool] = [_tool(name, options) for name in options.tools]
        for server in options.mcp:
            made += _served(server)
        self._tools = {tool.name: tool for tool in made}
        if not made or len(self._tools) < len(made):
            names = ", ".join(tool.name for tool in made) or "none"
            raise BackendError(
                "options_json.tools", f"tools need names of their own, and one at least: {names}"
            )
        self._limits = Limits(options.deadline_s, options.most_calls, options.most_characters, options.images)
        self.images = options.images
        self._turns = 0

    def reset(self, seed: int, item: Mapping[str, Any]) -> tuple[Sequence[Message], Sequence[ToolSchema]]:
        """The item's question, or its conversation."""
        self._turns = 0
        asked = item.get("messages") or [{"role": "user", "content": str(item.get("question", ""))}]
        system = [{"role": "system", "content": self._options.system}] if self._options.system else []
        return [*system, *asked], [tool.schema for tool in self._tools.values()]

    def step(self, message: Message) -> tuple[Sequence[Message], float, bool]:
        """Answers the calls; a turn without any is the last one."""
        _, calls = beside_calls(self._options.parser, message["content"], self._tools)
        found = answers(calls, self._tools, self._limits)
        self._turns += 1
        named = [
            (call.name or "unknown", call.id or f"call{self._turns:03}{at:02}")
            for at, call in enumerate(calls)
        ]
        told = [
            {"role": "tool", "content": each, "tool_call_id": id, "name": name}
            for each, (name, id) in zip(found, named, strict=False)
        ]
        return told, 0.0, not calls


def calculator(expression: str) -> str:
    """Computes an arithmetic expression of numbers, + - * / // % ** and brackets, such as "(3 + 4) * 12"."""
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"the expression is longer than {LONGEST_EXPRESSION} characters")
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.AST) -> int | float:
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) * max(1, int(abs(left))).bit_length() > LARGEST_BITS:
            raise ValueError("the power is too large")
        return _bounded(OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return _bounded(OPERATORS[type(node.op)](_value(node.operand)))
    raise ValueError("only numbers, + - * / // % ** and brackets are computed")


def _bounded(value: Any) -> int | float:
    if isinstance(value, complex) or (isinstance(value, int) and value.bit_length() > LARGEST_BITS):
        raise ValueError("the result is no number that can be written")
    found: int | float = value
    return found


def python_tool(memory_bytes: int, output_bytes: int, sandbox: Policy) -> Tool:
    """The tool `python`, whose code runs in the sandbox; its walls are told to the service's log."""
    try:
        sys.stderr.write(f"tool python: {require_walls(sandbox)}\n")
    except NotHeld as error:
        raise BackendError("options_json.sandbox", str(error)) from error

    def python(code: str, left_s: float) -> str:
        """Runs Python code in a fresh interpreter without network; returns what it prints and the last line's value."""
        limits = SandboxLimits(wall_s=left_s, memory_bytes=memory_bytes, output_bytes=output_bytes)
        (outcome,) = run_programs(code, [""], limits, echo=True, total_s=left_s)
        if outcome.end == "time":
            raise TimeoutError
        told = {
            "output": "it printed too much",
            "signal": f"it ended by signal {-outcome.status}",
            "lost": "it was lost",
        }
        return (outcome.out + outcome.err + told.get(outcome.end, "")).rstrip() or "(it printed nothing)"

    return Tool(python, bounded=True)


def _served(server: ServerOptions) -> Sequence[AnyTool]:
    _needs("mcp", "mcp")
    try:
        return service_of(server).tools()
    except (ServiceLost, ValueError) as error:
        raise BackendError("options_json.mcp", str(error)) from error


def _needs(extra: str, module: str) -> None:
    try:
        require(extra, module)
    except BackendError as error:
        raise BackendError(f"options_json.{extra}", error.message) from error


def _built_in(name: str, options: ToolOptions) -> Tool:
    if name == "python":
        output_bytes = max(4 * options.most_characters, 1 << 16)
        return python_tool(options.python_memory_mib << 20, output_bytes, options.sandbox)
    if name == "search":
        if options.search is None:
            raise BackendError(
                "options_json.search", "the tool search needs a corpus: search: {corpus: texts.jsonl}"
            )
        _needs("search", "bm25s")
        try:
            return Tool(search_tool(options.search))
        except ValueError as error:
            raise BackendError("options_json.search.corpus", str(error)) from error
    return Tool(calculator)


BUILT_IN = ("calculator", "python", "search")


def _tool(name: str, options: ToolOptions) -> Tool:
    if not is_user_environment(name) and name not in BUILT_IN:
        raise BackendError("options_json.tools", unknown("tool", name, BUILT_IN).message)
    if name in BUILT_IN:
        return _built_in(name, options)
    try:
        return Tool(load_factory(name, "function"))
    except (TypeError, NameError) as error:
        raise BackendError("options_json.tools", f"{name}: {error}") from error
    except BackendError as error:
        raise BackendError("options_json.tools", error.message) from error
