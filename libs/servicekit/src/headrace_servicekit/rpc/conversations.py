"""Who took the turns of a conversation, and in which order their tokens stand in its trajectory."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.common.v1 import common_pb2


def turn_roles(talk: common_pb2.Conversation) -> list[str]:
    """The role that took each turn of the policy; empty where there are no roles."""
    found = [talk.messages[place].party for place in talk.turn_messages if place < len(talk.messages)]
    return found if any(found) else []


def in_token_order(roles: Sequence[str], turns: int) -> list[int]:
    """Numbers of `turns` turns as their tokens stand: role by role, in the order in which these spoke first."""
    if not roles:
        return list(range(turns))
    places = {role: place for place, role in enumerate(dict.fromkeys(roles))}
    return sorted(range(turns), key=lambda turn: places[roles[turn]])
