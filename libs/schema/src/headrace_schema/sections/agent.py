"""The section of an agent that speaks with the policy through an endpoint."""

from __future__ import annotations

import shlex
from typing import Any, Literal

from pydantic import Field

from headrace_schema.sections.base import FEW, Count, CountOrZero, Seconds, Section

AGENTS = "agent"
"""The simulator's backend that starts agents."""
AGENT_SECONDS = 600.0
LONGEST_TASK = 200
"""Characters of a command that name what is started."""
ONLINE = "online"
"""The task of a run that outside clients speak with."""


class OnlineSection(Section):
    """Clients of one's own that speak with the policy while it learns, and reward what it says."""

    reward_within_s: Seconds = Field(
        default=600.0,
        description="seconds after a session's last answer until which its reward has to come; else it is dropped",
    )
    max_sessions: Count = Field(
        default=4096, description="sessions that are open at once; further ones are refused"
    )
    max_turns: CountOrZero = Field(default=0, description="requests of one session; 0: any number")


class AgentSection(Section):
    """A program that speaks with the policy as with any OpenAI-compatible server; started once a sample.

    It finds the endpoint and its key in OPENAI_BASE_URL and OPENAI_API_KEY.
    """

    python: str = Field(
        default="",
        description="path/to/file.py:function, called as function(seed, item); what it returns is the reward",
    )
    command: list[str] = Field(
        max_length=FEW,
        default_factory=list,
        description="program and arguments; reads {seed, item} as JSON from its standard input, and posts its reward",
    )
    backend: str = Field(
        default="",
        description="a simulator backend of a plug-in that starts agents, such as verifiers: what it starts speaks, "
        "and says its reward",
    )
    task: str = Field(default="", description="what the backend starts, such as a taskset of verifiers")
    options: dict[str, Any] = Field(default_factory=dict, description="options of what the backend starts")
    online: OnlineSection | None = Field(
        default=None,
        description="nothing is started: clients from outside speak with the policy (headrace run endpoint RUN), and "
        "the run learns from the sessions that they reward",
    )
    sampling: Literal["request", "run"] = Field(
        default="request",
        description="who says how the tokens of an answer are drawn. request: the request, with temperature, top_p "
        "and seed, and sampling where it does not say. Each token is learned from at the temperature that it had; an "
        "answer at temperature 0 or with top_p below 1 is context without loss. run: sampling, whatever requests say",
    )
    forms: Literal["refuse", "hint"] = Field(
        default="refuse",
        description="what becomes of a request that asks for a form into which no answer is forced (response_format, "
        "a forced tool_choice, parallel_tool_calls: false). hint: it is answered as if it did not ask, and the "
        "response's header x-headrace-not-forced names the keys",
    )
    tool_calls: Literal[
        "hermes", "json", "llama3", "mistral", "qwen3_coder", "glm", "deepseek", "minimax", "pythonic"
    ] = Field(
        default="hermes",
        description="form in which the model calls the tools that the agent names: hermes (Hermes, Qwen 2.5, Qwen 3), "
        "qwen3_coder (Qwen3-Coder, Qwen 3.5 and later, Nemotron 3), glm (GLM-4.5 and later), deepseek, minimax, "
        "pythonic (Llama 4, OLMo 3, LFM2), llama3, mistral, or json (a JSON object alone)",
    )

    @property
    def started(self) -> dict[str, Any]:
        """The environment's keys that follow: by which backend, what is started, and with which options."""
        if self.backend:
            return {"backend": self.backend, "tasks": [self.task], "options": self.options}
        words = " ".join(shlex.join(self.command).split())  # a script has lines
        return {
            "backend": AGENTS,
            "tasks": [self.python or f"command: {words}"[:LONGEST_TASK]],
            "options": {"command": self.command} if self.command else {},
        }
