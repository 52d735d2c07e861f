"""Learning curves as a plain SVG: a panel an algorithm, a line a seed. Knows only names and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

Curves = Mapping[str, Mapping[int, Sequence[float]]]
"""Rewards of the steps by algorithm and seed; rewards lie between 0 and 1."""

COLUMNS, WIDTH, HEIGHT = 3, 250, 150
LEFT, TOP, GAP_X, GAP_Y, BOTTOM = 36, 28, 24, 44, 72
LEGEND = 480
"""Least width, so that the line below the panels is not cut."""
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#8e5ea2", "#b8860b")
TEXT = 'font-family="sans-serif" font-size="11" fill="#333"'
WINDOW = 5
"""Steps that are averaged, so that a line can be followed."""


def smoothed(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """The mean of each value and of up to `window` - 1 before it."""
    starts = (max(0, index + 1 - window) for index in range(len(values)))
    return [sum(values[start : index + 1]) / (index + 1 - start) for index, start in enumerate(starts)]


def draw(curves: Curves, what: str = "mean reward of a step", ends: Mapping[str, str] | None = None) -> str:
    """The SVG's text. All panels share the scale from 0 to 1; each goes to the steps of its own longest run, or to
    what `ends` says of it.
    """
    columns, rows = min(COLUMNS, len(curves)), -(-len(curves) // COLUMNS)
    width = max(LEFT + columns * (WIDTH + GAP_X), LEGEND)
    height = TOP + rows * (HEIGHT + GAP_Y) - GAP_Y + BOTTOM
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">']
    parts.append(f'<rect width="{width}" height="{height}" fill="#fff"/>')
    for index, (name, seeds) in enumerate(curves.items()):
        x = LEFT + (index % COLUMNS) * (WIDTH + GAP_X)
        y = TOP + (index // COLUMNS) * (HEIGHT + GAP_Y)
        steps = max(map(len, seeds.values()))
        end = (ends or {}).get(name, f"{steps} steps")
        parts += [f'<g transform="translate({x} {y})">', *_panel(name, seeds, steps, end), "</g>"]
    parts += _legend(sorted({seed for seeds in curves.values() for seed in seeds}), what, height - 12)
    return "\n".join([*parts, "</svg>", ""])


def _panel(name: str, seeds: Mapping[int, Sequence[float]], steps: int, end: str) -> Iterator[str]:
    yield f'<text x="0" y="-8" {TEXT} font-weight="bold">{escape(name)}</text>'
    for share in (0.0, 0.5, 1.0):
        y = HEIGHT * (1 - share)
        yield f'<line x1="0" x2="{WIDTH}" y1="{y:g}" y2="{y:g}" stroke="#ddd"/>'
        yield f'<text x="-5" y="{y + 4:g}" text-anchor="end" {TEXT}>{share:g}</text>'
    for x, anchor, label in ((0, "start", "0"), (WIDTH, "end", end)):
        yield f'<text x="{x}" y="{HEIGHT + 15}" text-anchor="{anchor}" {TEXT}>{label}</text>'
    for index, (seed, values) in enumerate(sorted(seeds.items())):
        points = " ".join(
            f"{WIDTH * (step + 1) / steps:.1f},{HEIGHT * (1 - value):.1f}"
            for step, value in enumerate(smoothed(values))
        )
        line = f'fill="none" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="1.5"'
        yield f'<polyline points="{points}" {line}><title>seed {seed}</title></polyline>'


def _legend(seeds: Sequence[int], what: str, y: int) -> Iterator[str]:
    """The seeds' colours, and below them what is drawn."""
    for index, seed in enumerate(seeds):
        x, above = LEFT + index * 80, y - 18
        line = f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="2"'
        yield f'<line x1="{x}" x2="{x + 20}" y1="{above - 4}" y2="{above - 4}" {line}/>'
        yield f'<text x="{x + 26}" y="{above}" {TEXT}>seed {seed}</text>'
    yield f'<text x="{LEFT}" y="{y}" {TEXT}>{escape(what)}, averaged over {WINDOW} steps</text>'
