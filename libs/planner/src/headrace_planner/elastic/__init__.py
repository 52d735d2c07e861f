"""The elastic policy: when devices move inside a step, and the expected times that decide it."""

from headrace_planner.elastic.policy import ElasticState, Move, Role, Rollout, plan_elastic

__all__ = ["ElasticState", "Move", "Role", "Rollout", "plan_elastic"]
