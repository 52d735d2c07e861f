"""Who speaks in a conversation, and what each role has read: a sequence of its own. Knows no engine and no simulator.

Where there are no roles, one party without a name speaks, and its sequence is the conversation's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.simulator.v1 import simulator_pb2

from headrace_rollout.conversations.conversation import Conversation, heard
from headrace_rollout.engines.samples import Message, Prefix


@dataclass(eq=False)
class View:
    """What a role reads: `line` are its ids, `told` the messages that it has not read yet, `spoken` its last turn."""

    line: Conversation
    told: list[Message] = field(default_factory=list)
    spoken: Sequence[int] = ()


class Roles:
    """The roles of a conversation; `talk` gets what is said, and with `end` all that was read."""

    def __init__(self, talk: Conversation) -> None:
        self._talk = talk
        self._views: dict[str, View] = {"": View(talk)}
        self._turns: list[str] = []
        """Who took each turn that is learned from."""
        self._owed: dict[str, float] = defaultdict(float)
        """Rewards of roles that have not spoken yet."""

    def view(self, role: str) -> View:
        """That of a role."""
        return self._views.setdefault(role, View(Conversation((), [])))

    def hears(self, outcome: simulator_pb2.EnvironmentOutcome) -> str:
        """Adds what the environment says; returns who speaks next."""
        for message in outcome.messages:
            told = heard(message)
            self._say(told, message.party)
            self.view(message.party).told.append(told)
        return outcome.messages[-1].party if outcome.messages else ""

    def spoke(self, role: str, whole: Prefix, text: str, *, learns: bool = True) -> None:
        """Adds a turn of a role; one that does not learn is a message alone."""
        view = self.view(role)
        view.spoken = whole.token_ids
        view.line.takes(whole)
        if learns:
            self._talk.turn_tokens.append(len(whole.token_ids))
            self._talk.turn_messages.append(len(self._talk.said))
            self._turns.append(role)
        self._say(Message("assistant", text), role)

    def judged(self, role: str, outcome: simulator_pb2.EnvironmentOutcome) -> str:
        """Adds what the environment answered to a role's turn; returns who speaks next.

        A role's reward is of its last turn, or of its first where it has had none yet.
        """
        rewards = self._talk.rewards
        rewards += [self._owed.pop(each, 0.0) for each in self._turns[len(rewards) :]]
        for party, reward in (outcome.role_rewards or {role: outcome.reward}).items():
            if party in self._turns:
                rewards[len(self._turns) - 1 - self._turns[::-1].index(party)] += reward
            else:
                self._owed[party] += reward
        self._talk.success = outcome.success
        return self.hears(outcome)

    def end(self) -> None:
        """Makes the conversation's ids those of the roles that learn, one behind the other as they spoke first."""
        talk, lines = self._talk, [self._views[role].line for role in dict.fromkeys(self._turns) if role]
        for index, line in enumerate(lines):
            talk.reads(line, begins=not index)

    def _say(self, message: Message, party: str) -> None:
        self._talk.said.append(message)
        if party:
            self._talk.parties.append(party)
