"""Plans for people: the planner's as text with tree, Gantt chart and bottleneck, a run's as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from headrace_cli.output import table

if TYPE_CHECKING:
    from rich.table import Table

NARROWEST, SCALE_MARKS, SHOWN_STEPS = 60, 4, 5


def plan_lines(plan: dict[str, Any], width: int) -> Iterator[str]:
    """The explanation in lines of at most `width` columns (60 or more)."""
    width = max(NARROWEST, width)
    devices = ", ".join(f"{count} {kind}" for kind, count in plan["devices"].items())
    head = f"{plan['workflow']} on {devices}: {plan['mode']}, {seconds(plan['step_s'])} a step, "
    yield from wrapped(head + f"{plan['items_per_s']:.3g} trajectories/s", width)
    if plan["profile"]:
        yield from wrapped(f"profile: {plan['profile'].strip()}", width)
    yield from wrapped(f"({plan['note']})", width)
    yield ""
    for line in plan["tree_text"]:
        yield from wrapped(line, width)
    yield ""
    yield from gantt(plan["timeline"], plan["step_s"], width)
    yield ""
    worst = plan["bottleneck"]
    text = f"bottleneck: {worst['stage']}, at work {worst['busy_share']:.0%} of the step; "
    text += f"{_idle(plan)}, switching {seconds(plan['switch_s'])}, "
    text += (
        f"weight sync {seconds(plan['sync_s'])}; no plan can take less than {seconds(plan['lower_bound_s'])}"
    )
    yield from wrapped(text, width)
    yield ""
    for each in plan.get("decided", ()):
        yield from wrapped(f"{each['key']}: {each['value']}, decided by the GPUs: {each['why']}", width)
    if plan.get("decided"):
        yield ""
    if "layout" in plan:
        yield from layout_lines(plan["layout"], width)
        yield ""
    if "simulation" in plan:
        yield from simulation_lines(plan["simulation"], width)
        yield ""
    for other in plan["alternatives"]:
        time = seconds(other["step_s"]) if other["step_s"] is not None else "-"
        yield from wrapped(f"{other['mode']}: {time}; {other['why']}", width)
    if plan.get("asynchronous"):
        yield from asynchronous_lines(plan["asynchronous"], width)
    for more in plan["more_devices"]:
        devices = ", ".join(f"{count} {kind}" for kind, count in more["devices"].items())
        yield from wrapped(f"with {devices}: {seconds(more['step_s'])}, {more['faster']:.0%} faster", width)
    if any(plan["fit_errors"].values()):
        fits = ", ".join(f"{stage} {error:.1%}" for stage, error in plan["fit_errors"].items() if error)
        yield from wrapped(f"worst error of the profile's fits: {fits}", width)


def _idle(plan: dict[str, Any]) -> str:
    shares = plan["idle_shares"]
    if len(shares) == 1:
        return f"devices idle {plan['idle_share']:.0%}"
    return ", ".join(f"{kind} idle {share:.0%}" for kind, share in shares.items())


def layout_lines(layout: dict[str, Any], width: int) -> Iterator[str]:
    """How the trainers would hold the model, and the bytes of a rank by what they are for; or what is in the way."""
    if "problem" in layout:
        first, *table = layout["problem"].splitlines()
        yield from wrapped(f"trainers: {first}", width)
        yield from table
        return
    yield from wrapped(f"trainers: {layout['reason']}", width)
    for where, part in (("on a GPU", "device"), ("of its host, a rank", "host")):
        sizes = sorted(((size, name) for name, size in layout[part].items() if size), reverse=True)
        words = ", ".join(f"{name} {size / 2**30:.2f} GiB" for size, name in sizes)
        yield from wrapped(f"{where}: {words}", width)


def simulation_lines(simulated: dict[str, Any], width: int) -> Iterator[str]:
    """Predicted beside simulated seconds, why they differ, and what the devices did."""
    steps = ", ".join(seconds(step) for step in simulated["steps_s"][:SHOWN_STEPS])
    more = ", …" if len(simulated["steps_s"]) > SHOWN_STEPS else ""
    off = simulated["step_s"] / simulated["predicted_s"] - 1
    text = f"simulated: {seconds(simulated['step_s'])} a step, "
    text += f"predicted {seconds(simulated['predicted_s'])} ({off:+.1%}); "
    yield from wrapped(text + f"seed {simulated['seed']}, steps {steps}{more}", width)
    why = f"of the difference {simulated['lengths_s']:+.3g} s come from the drawn lengths"
    for stage, drawn in simulated["drawn"].items():
        why += f" ({stage}: on average {drawn['mean']:.3f} of the mean, the longest {drawn['longest']:.2f} of at "
        why += f"most {drawn['limit']:.2f})"
    yield from wrapped(
        why + f", {simulated['whole_items_s']:+.3g} s from whole items, rounds and chunks", width
    )
    yield ""
    rows = simulated["device_seconds"]
    names = max(len(row["stage"]) for row in rows)
    for row in rows:
        name, spent = f"{row['stage']:<{names}}"[: width - 40], f"{row['device_s']:,.0f}"
        yield f"{name}  {row['label']:<15} {spent:>12} device-s {row['share']:>6.1%}"[:width]


def asynchronous_lines(found: dict[str, Any], width: int) -> Iterator[str]:
    """A line for each bound of staleness, and from which on the trainer waits for no tail."""
    for row in found["by_staleness"]:
        text = f"asynchronous, max_staleness {row['max_staleness']}: {seconds(row['step_s'])}, {row['faster']:+.0%}; "
        text += f"{row['generate_devices']} generate, {row['learn_devices']} learn {seconds(row['learn_s'])}"
        if "simulated_s" in row:
            text += f"; simulated {seconds(row['simulated_s'])}, the trainer waits for a tail in "
            text += (
                f"{row['waited_steps_share']:.0%} of the steps, {row['waited_time_share']:.0%} of the time"
            )
        yield from wrapped(text, width)
    enough = found["enough"]
    ends = "no bound up to 16 ends" if enough is None else f"max_staleness {enough} ends"
    yield from wrapped(
        f"with the devices of max_staleness {found['max_staleness']}, {ends} the wait for tails", width
    )


def seconds(value: float) -> str:
    """Seconds with three digits.

    >>> seconds(1061.3), seconds(3.14159), seconds(0.0)
    ('1061 s', '3.14 s', '0 s')
    """
    return f"{value:.0f} s" if value >= 100 or value == 0 else f"{value:.3g} s"


def gantt(timeline: list[dict[str, Any]], step_s: float, width: int) -> Iterator[str]:
    """A chart with one row for each bar; full blocks where it is mostly at work, light ones where it mostly waits.

    A bar's row has its `name`, or its stage with its devices. Rows are at most `width` columns wide; the last line is
    the scale in seconds.
    """
    names = [bar.get("name") or f"{bar['stage']} {bar['kind']} {_devices(bar)}" for bar in timeline]
    label = max(len(name) for name in names)
    room = max(10, width - label - 2)
    for name, bar in zip(names, timeline, strict=True):
        begin = min(room - 1, round(bar["begin"] / step_s * room))
        end = min(room, max(begin + 1, round(bar["end"] / step_s * room)))
        span = bar["end"] - bar["begin"]
        busy = max(1, round((end - begin) * (bar["busy"] / span if span else 1.0)))
        filled = "".join("█" if _busy(index, busy, end - begin) else "░" for index in range(end - begin))
        yield f"{name:<{label}} │{' ' * begin}{filled}".rstrip()
    yield f"{'':<{label}} └{scale(step_s, room)}"


def _devices(bar: dict[str, Any]) -> str:
    last = bar["first"] + bar["count"] - 1
    return f"{bar['first']}-{last}" if bar["count"] > 1 else str(bar["first"])


def _busy(index: int, busy: int, span: int) -> bool:
    """Whether column `index` is one of `busy` columns spread evenly over `span`."""
    return (index + 1) * busy // span > index * busy // span


def scale(step_s: float, room: int) -> str:
    """The axis of a chart from 0 to `step_s`: marks that have room in the columns, the first and the last always."""
    line, last = ["─"] * room, seconds(step_s)
    free = 0
    for mark in range(SCALE_MARKS):
        text, at = seconds(step_s * mark / SCALE_MARKS), round(room * mark / SCALE_MARKS)
        if at >= free and at + len(text) < room - len(last):
            line[at : at + len(text)] = text
            free = at + len(text) + 1
    line[room - len(last) :] = last
    return "".join(line)


def wrapped(text: str, width: int) -> Iterator[str]:
    """The text in lines of at most `width` columns; later lines are indented."""
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    line = text[: len(text) - len(text.lstrip())]
    empty = True
    for word in text.split():
        if not empty and len(line) + 1 + len(word) > width:
            yield line
            line, empty = indent, True
        line, empty = (line + word if empty else f"{line} {word}"), False
    yield line


def run_plan_table(plan: dict[str, Any]) -> Table:
    """How a run uses its devices."""
    measured: dict[str, float] = plan["measured_s"]
    seconds = [
        f"{name} {predicted:.3g} s" + (f" (last step {measured[name]:.3g} s)" if name in measured else "")
        for name, predicted in plan["predicted_s"].items()
    ]
    others = [f"{words}: {found:.3g} s" for words, found in plan["alternatives"].items()]
    rows: list[tuple[object, object]] = [
        ("placement", ", ".join(filter(None, (plan["mode"], plan.get("flow"), plan.get("memory"))))),
        ("chosen by", plan["chosen_by"]),
        ("from step", plan["from_step"]),
        ("why", plan["reason"]),
        ("generate on", _short(plan["rollout"])),
        ("learn on", _short(plan["trainer"])),
        ("predicted", "\n".join(seconds)),
        ("a step with", "\n".join(others)),
        ("proposal", plan["proposal"]),
    ]
    return table(("", ""), [row for row in rows if str(row[1])])


def _short(devices: Sequence[str]) -> str:
    return ", ".join(device.rpartition("/")[2] for device in devices)
