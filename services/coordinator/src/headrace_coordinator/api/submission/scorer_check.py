"""What only an instance can tell of a spec: whether its scorers load, take their options and judge a blank answer."""

from __future__ import annotations

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.spec import RunSpec

from headrace_coordinator.api.submission.trial import on_trial
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.workers.clients import RewardClient


async def try_scorers(spec: RunSpec, fleet: Fleet, trials: set[str]) -> list[KeyProblemView]:
    """Opens the spec's scorers at a ready reward instance and closes them; what it refuses, by key.

    Scorers without a file or options of the user's are known to work. An instance in trouble is the run's to handle.
    """
    scorers = [scorer for found in spec.reward.sets().values() for scorer in found]
    ready = fleet.ready("reward")
    if not ready or not any(".py:" in scorer.name or scorer.options for scorer in scorers):
        return []
    chosen = ready[0]
    try:
        with on_trial(RewardClient, chosen, fleet, trials) as trial:
            await trial.open_run(spec.reward)
            await trial.close_run()
    except CallRefused as refusal:
        if refusal.reason != "INVALID":
            return []
        _, _, text = refusal.message.partition(f"{refusal.key}: ")
        return [
            problem(
                refusal.key or "reward.scorers",
                text or refusal.message,
                f"mend it: {chosen.instance} has tried it, and its log says more",
            )
        ]
    except InstanceDown:
        if fleet.alive(chosen.incarnation):
            limit = f"{spec.reward.opening_s:g} s"
            return [
                problem(
                    "reward.load_timeout_s",
                    f"{chosen.instance} has not loaded and tried the scorers within {limit}",
                    "raise it, or make their import quicker",
                )
            ]
        return []
    return []
