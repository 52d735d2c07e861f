"""What calls have led to, as values by name that do not depend on time: of a recording, and of its replay."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.common.v1 import common_pb2
from headrace.reward.v1 import reward_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_servicekit.recording.files import Call
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.trajectories import segments_of

TIMES = ("seconds", "_per_second", "_bytes", "_ms")
"""Ends of the names of figures that say how long something took, or how large it was."""
Values = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """A value that is not the same; None where one of both lacks it."""

    name: str
    recorded: Any
    replayed: Any

    @property
    def relative(self) -> float:
        """Of two numbers: their difference over the larger; infinite for anything else."""
        one, other = self.recorded, self.replayed
        if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            parts = [Difference("", *pair).relative for pair in zip(one, other, strict=True)]
            return max(parts, default=0.0)
        if not isinstance(one, float | int) or not isinstance(other, float | int):
            return 0.0 if one == other else math.inf
        if one == other or (math.isnan(one) and math.isnan(other)):
            return 0.0
        largest = max(abs(one), abs(other))
        return abs(one - other) / largest if math.isfinite(largest) else math.inf


def hash_of(values: Values) -> str:
    """A digest of all values with their names; every bit of a number counts."""
    return digest_bytes(json.dumps(values, sort_keys=True).encode())


def differences(recorded: Values, replayed: Values) -> list[Difference]:
    """Values that are not the same, by name, in the order in which they came."""
    names = dict.fromkeys([*recorded, *replayed])
    found = (Difference(name, recorded.get(name), replayed.get(name)) for name in names)
    return [each for each in found if json.dumps(each.recorded) != json.dumps(each.replayed)]


def results(kind: str, call: Call, responses: Iterable[Any], reason: str) -> Values:
    """The values of one call; `reason` is that of its refusal."""
    step = f"step {call.step}"
    if reason:
        return {f"{step} {call.method}": f"refused: {reason}"}
    read = {"trainer": _of_trainer, "reward": _of_reward, "rollout": _of_rollout}[kind]
    found: Values = {}
    for response in responses:
        found |= {f"{step} {name}": value for name, value in read(call, response).items()}
    return found


def answered(response: Any) -> set[str]:
    """What a response of a stream answers: names of groups, items or trajectories."""
    match response:
        case trainer_pb2.LearnResponse():
            return {str(outcome.prompt_ordinal) for outcome in response.outcomes}
        case reward_pb2.ScoreResponse():
            return {_item(result) for result in response.results}
        case _:
            chunks = getattr(response, "chunks", ())
            return {_slot(chunk.finished) for chunk in chunks if chunk.HasField("finished")}


def asked(request: Any) -> set[str]:
    """What a request of a stream asks for, by the same names."""
    match request:
        case trainer_pb2.LearnRequest():
            return {str(group.prompt_ordinal) for group in request.groups}
        case reward_pb2.ScoreRequest():
            return {_item(item) for item in request.items}
        case _:
            return {
                f"{group.prompt_ordinal}.{sample.sample_index} attempt {sample.attempt}"
                for group in request.assign.groups
                for sample in group.samples
            }


def only(values: Values, names: set[str]) -> Values:
    """Of a stream's values those that were asked for: of an answer to what was asked before, nothing can be said."""
    return {name: value for name, value in values.items() if name.split(" ", 3)[-1] in names}


def _of_trainer(call: Call, response: Any) -> Values:
    match response:
        case trainer_pb2.RestoreResponse() if response.HasField("version"):
            return {"begins with weights": response.version.digest}
        case trainer_pb2.LearnResponse():
            return {f"group {each.prompt_ordinal}": _outcome(each) for each in response.outcomes}
        case trainer_pb2.CommitStepResponse():
            return _commit(response)
        case trainer_pb2.InferResponse():
            return {f"inferred {n}": list(each.values) for n, each in enumerate(response.sequences)}
    return {}


def _outcome(outcome: trainer_pb2.GroupOutcome) -> list[Any]:
    name = trainer_pb2.GroupDisposition.Name(outcome.disposition).removeprefix("GROUP_DISPOSITION_")
    return [name, outcome.digest, list(outcome.advantages)]


def _commit(response: trainer_pb2.CommitStepResponse) -> Values:
    figures = {name: value for name, value in sorted(response.figures.items()) if not name.endswith(TIMES)}
    return {
        "commit": trainer_pb2.CommitResult.Name(response.result).removeprefix("COMMIT_RESULT_"),
        "new weights": response.version.digest,
        "sequences": response.sequence_count,
        "tokens": response.token_count,
        **figures,
    }


def _of_reward(call: Call, response: Any) -> Values:
    if isinstance(response, reward_pb2.OpenRunResponse):
        return {"scorers": response.scorer_digest}
    return {
        f"answer {_item(each)}": [
            reward_pb2.ScoreStatus.Name(each.status).removeprefix("SCORE_STATUS_"),
            each.reward,
            dict(sorted(each.parts.items())),
            list(each.turns),
        ]
        for each in getattr(response, "results", ())
    }


def _of_rollout(call: Call, response: Any) -> Values:
    found: Values = {}
    for chunk in getattr(response, "chunks", ()):
        if chunk.HasField("finished"):
            trajectory = chunk.finished
            reason = common_pb2.FinishReason.Name(trajectory.finish_reason).removeprefix("FINISH_REASON_")
            found[f"answer {_slot(trajectory)}"] = [
                reason,
                [list(segment.tokens.token_ids) for segment in segments_of(trajectory)],
                [list(segment.tokens.log_probs) for segment in segments_of(trajectory)],
            ]
    return found


def _slot(trajectory: common_pb2.Trajectory) -> str:
    return f"{trajectory.sample.prompt_ordinal}.{trajectory.sample.sample_index} attempt {trajectory.attempt}"


def _item(result: reward_pb2.ScoreResult | reward_pb2.ScoreItem) -> str:
    where = " (evaluation)" if result.evaluation else f" {result.stage}" if result.stage else ""
    return f"{result.sample.prompt_ordinal}.{result.sample.sample_index} attempt {result.attempt}{where}"


def worst(found: Iterable[Difference]) -> float:
    """The largest relative difference."""
    return max((each.relative for each in found), default=0.0)


def merged(parts: Iterable[Mapping[str, Any]]) -> Values:
    """All values; of a name that comes twice, the later one."""
    together: Values = {}
    for part in parts:
        together |= part
    return together
