"""A child process: `python -m headrace_reward.child`. Reads frames, loads scorers, judges answers one by one.

It answers `catalogue`, `open` and `score`; what each frame holds is written down beside its function.
"""

from __future__ import annotations

import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from headrace_schema.references import redacted
from headrace_servicekit.process.worker_pipes import (
    become_worker,
    decode_json,
    encode_json,
    frame,
    read_frame,
)
from headrace_servicekit.registry import PluginError

from headrace_reward import judge, scorers
from headrace_reward.scorers.base import ScorerError, Unavailable

Sets = dict[str, list[judge.LoadedScorer]]


def main() -> None:
    """Serves until the parent closes the pipe."""
    reader, writer = become_worker()
    loaded: Sets = {}
    while (body := read_frame(reader)) is not None:
        message = decode_json(body)
        if message["operation"] == "score":
            score(loaded, message["answers"], writer)
        elif message["operation"] == "open":
            _write(writer, open_sets(loaded, message, writer))
        else:
            _write(writer, {"scorers": catalogue()})
    sys.stderr.flush()


def catalogue() -> list[dict[str, Any]]:
    """Name, description and options' JSON Schema of each scorer that can be found."""
    listed = []
    for name in scorers.SCORERS.names():
        try:
            found = scorers.SCORERS.find(name)
        except PluginError as error:
            # A third party's broken entry point must not hide the others.
            sys.stderr.write(f"scorer {name} is left out: {error}\n")
            continue
        schema = found.options.model_json_schema()
        listed.append({"name": name, "description": found.description, "options_schema": schema})
    return listed


def open_sets(loaded: Sets, message: dict[str, Any], writer: BinaryIO) -> dict[str, Any]:
    """Loads `sets` {name: [{name, options, part}]} for paths below `directory`, announcing each step {at}.

    `timeout_s` and `give` are those of the section. Returns {digests: {set: [digest]}, at_once: [set], one_process},
    or {error: {scorer_set, index, field, message, away}}.
    """
    directory = Path(message["directory"])
    for set_name, entries in message["sets"].items():
        loaded[set_name] = []
        for index, entry in enumerate(entries):
            place = {"scorer_set": set_name, "index": index}
            try:
                _write(writer, {"at": place | {"doing": "loaded"}})
                each = judge.load(entry["name"], entry["options"], entry["part"], directory, message["give"])
                _write(writer, {"at": place | {"doing": "probed with a blank answer"}})
                _check_limits(each, message, set_name)
                judge.probe(each)
            except ScorerError as error:
                away = isinstance(error, Unavailable)
                return {"error": place | {"field": error.field, "message": error.message, "away": away}}
            loaded[set_name].append(each)
    digests = {name: [each.digest for each in scorer_set] for name, scorer_set in loaded.items()}
    return {
        "digests": digests,
        "at_once": [name for name, scorer_set in loaded.items() if at_once(scorer_set)],
        "one_process": any(
            getattr(each.scorer, "one_process", False)
            for scorer_set in loaded.values()
            for each in scorer_set
        ),
    }


def _check_limits(each: judge.LoadedScorer, message: dict[str, Any], set_name: str) -> None:
    """Raises ScorerError where a scorer's own limits do not fit the run's section."""
    longest_s, timeout_s = getattr(each.scorer, "longest_s", 0.0), message["timeout_s"]
    if longest_s > timeout_s:
        raise ScorerError(
            "options.deadline_s",
            f"{longest_s:g} s are more than reward.timeout_s = {timeout_s:g}, after which the process is killed; "
            f"set reward.timeout_s: {longest_s + 10:g}, or a shorter deadline_s",
        )
    if getattr(each.scorer, "needs_pictures", False):
        if not message["pictures"]:
            raise ScorerError("name", f"{each.part} reads pictures of episodes; set reward.pictures: 1")
        if set_name == "evaluation":
            reason = f"{each.part} reads pictures, and scorers get those of training episodes alone"
            raise ScorerError(
                "name", f"{reason}; judge held-out ones by their outcome: leave reward.evaluation out"
            )
    if getattr(each.scorer, "needs_group", False) and "group" not in message["give"]:
        raise ScorerError("name", f"{each.part} compares answers of a group; set reward.give: [group]")


def score(loaded: Sets, answers: list[dict[str, Any]], writer: BinaryIO) -> None:
    """Judges answers {set, and the fields of `Answer`}; a reply frame each, in their order."""
    for name, group in groupby(answers, lambda fields: str(fields.pop("set"))):
        asked = [judge.answer_of(fields) for fields in group]
        begin = time.perf_counter()
        scorers_of_set = loaded[name]
        count = len(asked) if at_once(scorers_of_set) else 1
        for judgement in judge.judge(scorers_of_set, asked):
            reply = {
                "parts": judgement.parts,
                "scores": judgement.scores,
                "turns": judgement.turns,
                "fault": judgement.fault,
                "detail": judgement.detail,
                "wall_s": (time.perf_counter() - begin) / count,
            }
            _write(writer, reply)
            begin = begin if count > 1 else time.perf_counter()


def at_once(scorer_set: list[judge.LoadedScorer]) -> bool:
    """Whether a set judges its answers at once."""
    return any(each.at_once for each in scorer_set)


def _write(writer: BinaryIO, message: dict[str, Any]) -> None:
    # At once: the parent's clock for the next answer starts when it reads this one.
    # Texts of errors and of other people's code are shown to all: secrets of the spec are not in them.
    writer.write(frame(encode_json(redacted(message))))
    writer.flush()


if __name__ == "__main__":
    main()
