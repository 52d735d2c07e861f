"""A conversation in which the model may call tools until it answers: `environment.tasks: [tools]`.

Tools are plug-ins by name, and a user's own functions.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from headrace_servicekit.registry import Options, Plugin, PluginError, Registry
from headrace_servicekit.sandbox.run import POLICY, NotHeld, Policy, require_walls, run_programs
from headrace_servicekit.sandbox.run import Limits as SandboxLimits
from headrace_servicekit.tool_calls import beside_calls
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from headrace_simulator.backends.base import BackendError, Message
from headrace_simulator.backends.base import Tool as ToolSchema
from headrace_simulator.backends.conversation.calls import AnyTool, Limits, ServiceLost, Tool, answers
from headrace_simulator.backends.conversation.services import ServerOptions, service_of
from headrace_simulator.backends.options import require
from headrace_simulator.backends.user_file import is_user_environment, load_factory

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


class ToolChoice(Options):
    """A tool with options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


class ToolOptions(Options):
    """Options of `tools`."""

    tools: list[str | ToolChoice] = Field(
        ["calculator"],
        description="tools by name (calculator, python, search), or with options as {name, options}, and functions as "
        "path/to/file.py:function",
    )
    mcp: list[ServerOptions] = Field(
        default_factory=list, description="MCP servers, whose tools the model gets too"
    )
    parser: Literal[
        "hermes", "json", "llama3", "mistral", "qwen3_coder", "glm", "deepseek", "minimax", "pythonic"
    ] = Field(
        "hermes",
        description="form of calls: hermes (Hermes, Qwen 2.5, Qwen 3), qwen3_coder (Qwen3-Coder, Qwen 3.5 and later, "
        "Nemotron 3), glm (GLM-4.5 and later), deepseek, minimax, pythonic (Llama 4, OLMo 3, LFM2), llama3, mistral, "
        "or json (a JSON object alone)",
    )
    system: str = Field("", description="system message that the conversation begins with")
    deadline_s: PositiveFloat = Field(5.0, description="seconds that the calls of one turn may take together")
    retries: NonNegativeInt = Field(
        1,
        description="times that a call is asked again whose service (an MCP server, a search) was lost meanwhile",
    )
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
        made: list[AnyTool] = [_tool(choice) for choice in options.tools]
        for server in options.mcp:
            made += _served(server)
        self._tools = {tool.name: tool for tool in made}
        if not made or len(self._tools) < len(made):
            names = ", ".join(tool.name for tool in made) or "none"
            raise BackendError(
                "options_json.tools", f"tools need names of their own, and one at least: {names}"
            )
        self._limits = Limits(
            options.deadline_s, options.most_calls, options.most_characters, options.retries, options.images
        )
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
            {"role": "tool", "content": each.content, "tool_call_id": id, "name": name}
            | ({"retries": each.retries} if each.retries else {})
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


class PythonOptions(Options):
    """Of the code that the tool `python` runs."""

    memory_mib: PositiveInt = Field(512, description="its memory")
    output_bytes: PositiveInt = Field(1 << 16, description="what it may print")
    sandbox: Policy = Field("required", description=POLICY)


def python_tool(options: PythonOptions) -> Tool:
    """The tool `python`, whose code runs in the sandbox; its walls are told to the service's log."""
    try:
        sys.stderr.write(f"tool python: {require_walls(options.sandbox)}\n")
    except NotHeld as error:
        raise ValueError(f"sandbox: {error}") from error

    def python(code: str, left_s: float) -> str:
        """Runs Python code in a fresh interpreter without network; returns what it prints and the last line's value."""
        memory_bytes, output_bytes = options.memory_mib << 20, options.output_bytes
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


CALCULATOR = Plugin(lambda options: Tool(calculator), description="arithmetic")
PYTHON = Plugin(python_tool, PythonOptions, "runs code in the sandbox")
TOOLS: Registry[AnyTool] = Registry(
    "headrace.tools",
    "tool",
    "options_json.tools",
    "options_json.tools",
    {name: f"{__name__}:{name.upper()}" for name in ("calculator", "python")},
)
"""Tools by name; search is that of the dist headrace-search."""


def _served(server: ServerOptions) -> Sequence[AnyTool]:
    try:
        require("mcp", "mcp")
        return service_of(server).tools()
    except BackendError as error:
        raise BackendError("options_json.mcp", error.message) from error
    except (ServiceLost, ValueError) as error:
        raise BackendError("options_json.mcp", str(error)) from error


def _tool(choice: str | ToolChoice) -> AnyTool:
    """A user's function, or a tool by its name. Raises BackendError."""
    name, options = (choice, {}) if isinstance(choice, str) else (choice.name, choice.options)
    try:
        if is_user_environment(name):
            if options:
                raise BackendError(TOOLS.key, f"{name}: a function takes no options")
            return Tool(load_factory(name, "function"))
        if name == "search" and name not in TOOLS.names():
            raise BackendError(TOOLS.key, "search needs a package: pip install headrace-search")
        return TOOLS.choose(name, options).build()
    except PluginError as error:
        first = error.problems[0]
        key = (
            first.key if name not in TOOLS.names() else first.key.replace(TOOLS.key, f"{TOOLS.key}.{name}", 1)
        )
        raise BackendError(key, f"{first.problem}; {first.fix}") from error
    except BackendError as error:
        raise BackendError(TOOLS.key, error.message) from error
    except (TypeError, NameError) as error:
        raise BackendError(TOOLS.key, f"{name}: {error}") from error
    except ValueError as error:
        raise BackendError(f"{TOOLS.key}.{name}", str(error)) from error
