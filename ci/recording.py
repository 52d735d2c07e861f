"""Draws a command's terminal as an animated SVG: `python -m ci.recording FILE.svg COMMAND…`; see `make recording`.

The command runs in a pseudo-terminal and what it really prints is drawn: at most `FRAMES` pictures of the screen, shown
one after the other by CSS. Understands the escapes that rich writes (colours, cursor up, erase a line), no others.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS, ROWS = 96, 30
FRAMES = 16
FRAME_S, LAST_S = 0.8, 5.0
LOOK_S = 0.25
"""A screen that stood for so long is a picture."""
FONT = "ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace"
ADVANCE, LINE = 8.4, 18  # of a 14 px monospaced font, in px
ESCAPE = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\r\n|[\r\n]")


class Screen:
    """Lines of text with colour escapes, and the line that the cursor is on."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = 0
        self._returned = False

    def write(self, output: str) -> None:
        """Obeys a program's output."""
        place = 0
        for found in ESCAPE.finditer(output):
            self._put(output[place : found.start()])
            place = found.end()
            self._obey(found)
        self._put(output[place:])

    def _obey(self, found: re.Match[str]) -> None:
        number, command = found[1] or "", found[2]
        if command == "m":
            self._put(found[0])
        elif command == "K":
            self.lines[self._row] = ""
        elif command == "A":
            self._row = max(0, self._row - int(number or 1))
        elif found[0] == "\r":
            self._returned = True
        elif found[0].endswith("\n"):
            self._row, self._returned = self._row + 1, False
            if self._row == len(self.lines):
                self.lines.append("")

    def _put(self, text: str) -> None:
        if not text:
            return
        if self._returned:
            self.lines[self._row], self._returned = "", False
        self.lines[self._row] += text


def record(command: Sequence[str]) -> list[list[str]]:
    """Runs a command in a pseudo-terminal; returns its screens, each once. Its exit status must be 0."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    variables.pop("NO_COLOR", None)
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    screens: list[list[str]] = []
    screen = Screen()
    for output in _outputs(ours):
        if output:
            screen.write(output)
        elif not screens or screens[-1] != screen.lines:
            screens.append([*screen.lines])
    screens.append([*screen.lines])
    if status := process.wait():
        raise SystemExit(f"{' '.join(command)} ended with status {status}:\n" + "\n".join(screen.lines))
    return screens


def _outputs(terminal: int) -> Iterator[str]:
    """What is written to a terminal, and an empty text whenever it is time for a picture; ends with the writer."""
    rest, pictured = b"", time.monotonic()
    while True:
        readable, _, _ = select.select([terminal], [], [], LOOK_S)
        if readable:
            try:
                rest += os.read(terminal, 65536)
            except OSError:  # Linux's word for the end of a pseudo-terminal
                return
            whole = rest.decode(errors="ignore")
            cut = max(whole.rfind("\x1b", len(whole) - 12), -1)
            done = whole if cut < 0 or ESCAPE.match(whole, cut) else whole[:cut]
            yield done
            rest = whole[len(done) :].encode()
        elif time.monotonic() - pictured >= LOOK_S:
            pictured = time.monotonic()
            yield ""


def thinned(screens: list[list[str]]) -> list[list[str]]:
    """At most `FRAMES` screens at even distances, the first and the last among them."""
    if len(screens) <= FRAMES:
        return screens
    return [screens[round(n * (len(screens) - 1) / (FRAMES - 1))] for n in range(FRAMES)]


def draw(screens: list[list[str]], title: str) -> str:
    """The SVG."""
    shown = [screen[-ROWS:] for screen in screens]
    rows = max(len(screen) for screen in shown)
    width, height = int(COLUMNS * ADVANCE) + 24, rows * LINE + 46
    classes: dict[str, str] = {}
    frames = "".join(
        f'<g class="f" style="{_timing(number, len(shown))}">{_lines(screen, classes)}</g>'
        for number, screen in enumerate(shown)
    )
    whole_s = FRAME_S * (len(shown) - 1) + LAST_S
    styles = "".join(f".{name}{{{style}}}" for style, name in classes.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" xml:space="preserve" role="img" '
        f'aria-label="{escape(title)}"><style>text{{font:14px {FONT};fill:#d9d9d9;white-space:pre}}'
        f"{styles}.f{{visibility:hidden;animation:{whole_s:.2f}s step-end infinite}}"
        f"@keyframes one{{0%{{visibility:visible}}{100 * FRAME_S / whole_s:.3f}%,100%{{visibility:hidden}}}}"
        f"@keyframes end{{0%{{visibility:visible}}{100 * LAST_S / whole_s:.3f}%,100%{{visibility:hidden}}}}"
        "@media(prefers-reduced-motion:reduce){.f{animation:none!important}.f:last-of-type{visibility:visible}}"
        f'</style><rect width="{width}" height="{height}" rx="8" fill="#15181c"/>'
        '<circle cx="18" cy="16" r="5" fill="#ff5f57"/><circle cx="36" cy="16" r="5" fill="#febc2e"/>'
        '<circle cx="54" cy="16" r="5" fill="#28c840"/>'
        f'<text x="76" y="21">{escape(title)}</text>{frames}</svg>\n'
    )


def _timing(number: int, count: int) -> str:
    name = "end" if number == count - 1 else "one"
    return f"animation-name:{name};animation-delay:{FRAME_S * number:.2f}s"


def _lines(screen: list[str], classes: dict[str, str]) -> str:
    console = Console(color_system="truecolor", width=COLUMNS, file=sys.stderr)
    made = []
    for row, line in enumerate(screen):
        y, column, runs = 52 + row * LINE, 0, []
        for segment in Text.from_ansi(line).render(console, end=""):
            text, style = segment.text, segment.style
            bare = text.strip()
            if bare:
                start = column + len(text) - len(text.lstrip())
                css = _css(style.color, style.bold, style.dim) if style else ""
                name = classes.setdefault(css, f"s{len(classes)}") if css else ""
                kind = f' class="{name}"' if name else ""
                length = f' textLength="{len(bare) * ADVANCE:.1f}"' if len(bare) > 1 else ""
                runs.append(
                    f'<tspan x="{12 + start * ADVANCE:.1f}"{length}{kind}>{escape(bare, quote=False)}</tspan>'
                )
            column += len(text)
        if runs:
            made.append(f'<text y="{y}">{"".join(runs)}</text>')
    return "".join(made)


def _css(colour: object, bold: bool | None, dim: bool | None) -> str:
    from rich.color import Color

    found = []
    if isinstance(colour, Color) and not colour.is_default:
        red, green, blue = colour.get_truecolor(MONOKAI)
        found.append(f"fill:#{red:02x}{green:02x}{blue:02x}")
    if bold:
        found.append("font-weight:700")
    if dim:
        found.append("fill-opacity:.7")
    return ";".join(found)


def main(arguments: Sequence[str]) -> int:
    """Exit status 2 when the arguments make no sense."""
    if len(arguments) < 2:
        print("usage: python -m ci.recording FILE.svg COMMAND…", file=sys.stderr)
        return 2
    file, *command = arguments
    screens = thinned(record(command))
    if folder := os.environ.get("HEADRACE_DATA_DIR"):  # a temporary one says nothing to a reader
        screens = [[line.replace(folder, ".headrace") for line in screen] for screen in screens]
    drawing = draw(screens, "$ " + " ".join([Path(command[0]).name, *command[1:]]))
    Path(file).write_text(drawing, encoding="utf-8")
    print(f"{file}: {len(drawing) // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
