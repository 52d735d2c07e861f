"""A run's timeline as text: what each device did when, beside what the plan predicts. Calls no service."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from headrace_cli.show.plan import NARROWEST, gantt, scale, seconds, wrapped

GLYPHS = {
    "decode": "█",
    "train": "▓",
    "work": "▒",
    "sync": "=",
    "switch": "x",
    "wait for data": "d",
    "wait for reward": "r",
    "wait for tail": "t",
    "wait for lease": "·",
}
UNKNOWN = "?"
HOST = "host"
ROWS = 64
"""Devices that are drawn; the sums are of all."""


def timeline_lines(view: dict[str, Any], plan: dict[str, Any] | None, width: int) -> Iterator[str]:
    """A labelled timeline in lines of at most `width` columns (60 or more): lanes, sums, and the plan's step."""
    width = max(NARROWEST, width)
    parts, labels = view["parts"], view["labels"]
    begin, end = parts[0]["start"], parts[-1]["end"]
    steps = [part["step"] for part in parts if part["kind"] == "step"]
    span = (
        f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}" if steps else "no step"
    )
    yield from wrapped(
        f"{span}, {seconds(end - begin)}" + ("; --steps shows more" if view["older"] else ""), width
    )
    yield ""
    yield from _lanes(labels, begin, end, width)
    used = [label for label in GLYPHS if any(each["label"] == label for each in labels)]
    yield from _legend(used, width)
    yield ""
    yield from _sums(labels, width)
    if view["tail"] is not None:
        yield ""
        yield from wrapped(tail_line(view["tail"]), width)
    if plan is not None:
        yield ""
        yield from _beside(plan, width)


def _legend(labels: Iterable[str], width: int) -> Iterator[str]:
    line = ""
    for label in labels:
        text = f"{GLYPHS[label]} {label}"
        if line and len(line) + 2 + len(text) > width:
            yield line
            line = ""
        line += f"  {text}" if line else text
    if line:
        yield line


def _lanes(labels: list[dict[str, Any]], begin: float, end: float, width: int) -> Iterator[str]:
    """A row for each device; each column shows the label that has most of its time."""
    rows = _by_device(labels)
    names = {device: _name(device, rows) for device in list(rows)[:ROWS]}
    label = max(len(name) for name in names.values())
    room = max(10, width - label - 2)
    for device, name in names.items():
        yield f"{name:<{label}} │{_lane(rows[device], begin, end, room)}".rstrip()
    yield f"{'':<{label}} └{scale(end - begin, room)}"
    if len(rows) > ROWS:
        yield f"and {len(rows) - ROWS} other devices"


def _by_device(labels: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Spans by device, in the devices' order; those without a device are last."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in labels:
        for device in span["devices"] or [HOST]:
            found[device].append(span)
    return dict(sorted(found.items(), key=lambda row: (row[0] == HOST, len(row[0]), row[0])))


def _name(device: str, every: Iterable[str]) -> str:
    """The device without its host, where there is one host."""
    hosts = {each.rpartition("/")[0] for each in every if each != HOST}
    return device.rpartition("/")[2] if len(hosts) == 1 else device[-24:]


def _lane(spans: list[dict[str, Any]], begin: float, end: float, room: int) -> str:
    column = max(end - begin, 1e-9) / room
    spent: list[dict[str, float]] = [defaultdict(float) for _ in range(room)]
    for span in spans:
        first = max(0, int((span["start"] - begin) / column))
        for index in range(first, min(room, int((span["end"] - begin) / column) + 1)):
            low = begin + index * column
            share = min(span["end"], low + column) - max(span["start"], low)
            spent[index][span["label"]] += max(0.0, share)
    return "".join(
        GLYPHS.get(max(each, key=lambda name: each[name]), UNKNOWN) if any(each.values()) else " "
        for each in spent
    )


def device_seconds(labels: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """Device-seconds by stage and label, most first; work without a device is left out."""
    total: dict[tuple[str, str], float] = defaultdict(float)
    for span in labels:
        total[span["stage"], span["label"]] += (span["end"] - span["start"]) * len(span["devices"])
    return {key: value for key, value in sorted(total.items(), key=lambda row: (-row[1], row[0])) if value}


def _sums(labels: list[dict[str, Any]], width: int) -> Iterator[str]:
    found = device_seconds(labels)
    total, names = sum(found.values()) or 1.0, max((len(stage) for stage, _ in found), default=1)
    for (stage, label), value in found.items():
        name = f"{stage:<{names}}"[: width - 40]
        yield f"{name}  {label:<15} {value:>12,.2f} device-s {value / total:>6.1%}"[:width]


def tail_line(tail: dict[str, Any]) -> str:
    """How often the trainer waited for the longest answers of its step, and what would end that."""
    if not tail["waited"]:
        text = f"the trainer waited for no tail in {tail['steps']} steps"
        return f"{text}: a larger algorithm.max_staleness saves nothing"
    enough = tail["enough"]
    ends = f"an algorithm.max_staleness of about {enough}"
    if enough is None:
        ends = "no algorithm.max_staleness up to 16"
    text = f"the trainer waited for a tail in {tail['waited']} of {tail['steps']} steps, "
    text += f"at most {seconds(tail['longest_s'])}"
    return f"{text}; {ends} would end that (now {tail['max_staleness']})"


def _beside(plan: dict[str, Any], width: int) -> Iterator[str]:
    """The step that the plan predicts, as `headrace plan` draws one, and predicted beside measured seconds."""
    predicted, measured = plan["predicted_s"], plan["measured_s"]
    head = f"plan: {plan['mode']}, chosen by {plan['chosen_by']}, from step {plan['from_step']}"
    if not predicted:
        yield from wrapped(f"{head}; it predicts no seconds", width)
        return
    yield from wrapped(f"{head}, predicted:", width)
    yield from gantt(planned_bars(plan), predicted["step"], width)
    for name, value in predicted.items():
        last = f", last step {seconds(measured[name])}" if name in measured else ""
        off = f" ({measured[name] / value - 1:+.0%})" if name in measured and value else ""
        yield from wrapped(f"{name}: predicted {seconds(value)}{last}{off}", width)


def planned_bars(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """A bar for each stage that the plan predicts: in turns one after the other, else side by side."""
    predicted = plan["predicted_s"]
    step, bars, at = predicted["step"], [], 0.0
    in_turns = plan["mode"] == "collocated"
    stages = {name: value for name, value in predicted.items() if name != "step"}
    for index, (stage, value) in enumerate(stages.items()):
        if in_turns:
            begin, end = at, at = at, min(step, at + value)
        else:
            begin, end = (0.0, min(step, value)) if index == 0 else (max(0.0, step - value), step)
        used = plan["rollout"] if stage == "generate" else plan["trainer"] if stage == "learn" else []
        name = " ".join([stage, *(device.rpartition("/")[2] for device in used[:4]), *["…"][: len(used) > 4]])
        bars.append({"name": name, "begin": begin, "end": end, "busy": end - begin})
    return bars


def chrome_trace(view: dict[str, Any]) -> dict[str, Any]:
    """The labelled timeline for Perfetto: a process a host, a thread a device; times begin at the first part."""
    begin = view["parts"][0]["start"] if view["parts"] else 0.0
    devices = list(_by_device(view["labels"]))
    threads = {device: index for index, device in enumerate(devices, 1)}
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": device}}
        for device, thread in threads.items()
    ]
    events = [
        {
            "name": f"{span['stage']}: {span['label']}",
            "cat": span["label"],
            "ph": "X",
            "ts": round((span["start"] - begin) * 1e6),
            "dur": round((span["end"] - span["start"]) * 1e6),
            "pid": 1,
            "tid": threads[device],
            "args": {"instance": span["instance"]},
        }
        for span in view["labels"]
        for device in span["devices"] or [HOST]
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + events}
