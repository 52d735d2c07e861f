"""One conversation under way: the ids so far, what was said, and how it ended. Knows no engine and no simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.simulator.v1 import simulator_pb2

from headrace_rollout.engines.samples import (
    BEGINS,
    GIVEN,
    Distribution,
    Finish,
    Prefix,
    Said,
    SlotKey,
    TrajectoryUpdate,
)


@dataclass(eq=False)
class Conversation:
    """A sample under way. `tokens` are all those behind the prompt, `said` all messages, those of the prompt first.

    `parties`: with several roles, who said or is told each message.
    """

    prompt_ids: Sequence[int]
    said: list[tuple[str, str]]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turn_tokens: list[int] = field(default_factory=list)
    turn_messages: list[int] = field(default_factory=list)
    parties: list[str] = field(default_factory=list)
    drawn: list[Distribution | None] = field(default_factory=list)
    """As `Said.drawn`."""
    success: bool = False
    failure: str = ""

    @property
    def context(self) -> list[int]:
        """What the policy reads next."""
        return [*self.prompt_ids, *self.tokens]

    @property
    def turns(self) -> int:
        """Turns that the environment has taken."""
        return len(self.rewards)

    def spoke(self, whole: Prefix, text: str, drawn: Distribution | None = None) -> None:
        """Adds a turn of the policy, sampled from `drawn` (None: as the stream says).

        It carries loss, unless what it was drawn from is not whole: a trainer cannot compute its log-probs.
        """
        learned = drawn is None or drawn.whole
        self.takes(whole) if learned else self.gave(whole.token_ids)
        self.drawn.append(drawn)
        self.turn_tokens.append(len(whole.token_ids) if learned else 0)
        self.turn_messages.append(len(self.said))
        self.said.append(("assistant", text))

    def takes(self, whole: Prefix) -> None:
        """Adds sampled ids, which carry loss."""
        self.tokens += whole.token_ids
        self.log_probs += whole.log_probs
        self.spans += whole.spans

    def judged(self, outcome: simulator_pb2.EnvironmentOutcome) -> None:
        """Adds what the environment answered, as messages alone."""
        self.rewards.append(outcome.reward)
        self.success = outcome.success
        self.said += [(message.role, message.content) for message in outcome.messages]

    def gave(self, ids: Sequence[int], what: int = GIVEN) -> None:
        """Adds ids between two turns: context, without loss."""
        if ids:
            self.tokens += ids
            self.log_probs += [0.0] * len(ids)
            self.spans.append((what, len(ids)))

    def joined(self, siblings: Sequence[Conversation]) -> None:
        """Puts other lines of the same session behind this one: they are trained apart, and share its reward."""
        for each in siblings:
            self.spans += [(BEGINS, len(each.prompt_ids)), *each.spans]
            self.log_probs += [*[0.0] * len(each.prompt_ids), *each.log_probs]
            self.tokens += each.context
            self.rewards += each.rewards
            self.turn_tokens += each.turn_tokens
            self.turn_messages += [len(self.said) + place for place in each.turn_messages]
            self.said += each.said
            self.drawn += each.drawn

    def ended(
        self, key: SlotKey, attempt: int, number: int, finish: Finish, *, greedy: bool
    ) -> TrajectoryUpdate:
        """The whole conversation for the stream's caller."""
        whole = Prefix(self.tokens, self.log_probs, self.spans)
        return TrajectoryUpdate(
            key=key,
            attempt=attempt,
            offset=0,
            token_ids=whole.token_ids,
            log_probs=whole.log_probs,
            policy_number=number,
            prompt_ids=self.prompt_ids,
            finish=finish,
            whole=whole,
            greedy=greedy,
            said=Said(
                tuple(self.said),
                tuple(self.rewards),
                self.success,
                self.failure,
                tuple(self.turn_tokens),
                tuple(self.turn_messages),
                tuple(self.parties),
                tuple(self.drawn),
            ),
        )


def stopped(key: SlotKey, attempt: int, number: int) -> TrajectoryUpdate:
    """A conversation that was stopped: it begins anew elsewhere, so nothing of it goes with it."""
    return TrajectoryUpdate(key, attempt, 0, [], [], number, [], stopped=True, whole=Prefix([], [], []))
