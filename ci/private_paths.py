"""Refuses paths of one machine in what git tracks: they mean nothing to whoever clones the repository."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Written in pieces, so that this file passes its own check.
FOREIGN = re.compile(
    "|".join(
        [
            r"(?<![\w.])/" + r"work/",
            r"(?<![\w.])/tmp/" + r"\w",
            r"\.\./" + r"shared/",
            r"(?<![\w/.-])shared" + r"/\w",
        ]
    )
)


def findings(path: Path) -> list[str]:
    """Lines of a text file that name such a path."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
        return []
    name = path.relative_to(ROOT)
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for number, line in enumerate(text.splitlines(), 1)
        if FOREIGN.search(line)
    ]


def main() -> int:
    """Prints the findings; exit status 1 when there are any."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = [name for name in listing.stdout.decode().split("\0") if name]
    found = [line for name in names for line in findings(ROOT / name)]
    for line in found:
        print(line)
    if found:
        print("paths of one machine; use a relative path, a temporary directory of the test, or an option")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
