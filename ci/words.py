"""Refuses words that this project has replaced, in what git tracks: `docs/architecture/vocabulary.md` has the reasons.

Prints `file:line: word → what to say instead`. A word that has another meaning too (a GPU's kernel, the body of an HTTP
request, a port of TCP, a member of a group of trajectories) is not refused: only what names one of our things is.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READ = {
    ".py",
    ".pyi",
    ".proto",
    ".md",
    ".yaml",
    ".yml",
    ".toml",
    ".sh",
    ".js",
    ".html",
    ".css",
    ".json",
    ".lua",
}
EXEMPT = {
    "ci/words.py",
    "integration_tests/packaging/test_ci_tools.py",
    "docs/architecture/vocabulary.md",
    "CHANGELOG.md",
}
"""Files that name the replaced words in order to replace them, or that say what was."""
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def _word(text: str) -> str:
    """A word by itself, as a part of `snake_case`, or capitalised inside `CamelCase`; singular and plural."""
    first, rest = text[0], text[1:]
    return rf"(?:(?<![A-Za-z])[{first}{first.upper()}]{rest}|{first.upper()}{rest})s?(?![a-z])|\b{text.upper()}S?\b"


def _phrase(*texts: str) -> str:
    """One of several phrases, in prose or with underscores."""
    return "|".join(rf"(?<![A-Za-z]){text.replace(' ', '[ _]')}(?![a-z])" for text in texts)


LEASE = "release (by the holder), revoke (by the manager) or expire; of retries: stop, fail"
REPLACED = [
    (_word("gang"), "trainer group (process group for torch's)"),
    (_word("custody") + r"|CUSTODY\w*", "retention"),
    (_word("crew"), "worker group"),
    (_phrase("lease desk") + "|LeaseDesk", "lease manager"),
    (_word("allotment"), "grant"),
    (_phrase("let go", "lets go", "letting go", "let goes"), LEASE),
    (r"\blet(?:s|ting)? (?:its|their|the|these|those|all) \w+ go\b(?! on)", LEASE),
    (_phrase("stands? down", "standing down", "stood down"), LEASE),
    (_phrase("gives? up(?! to)", "giving up(?! to)", "gave up(?! to)", "given up(?! to)"), LEASE),
    (r"\bmistakes\b", "errors, problems"),
    (r"\bSampleKeys?\b", "SlotKey"),
    (r"\b(?:[A-Z]\w*)?Meter\b", "step timer, metrics"),
    (r"\bPulse\b", "notifier"),
    (r"(?<!\w)together\(", "asyncio.TaskGroup or gather_all"),
    (r"\bwent back to (?:step|version)\b", "rewound to"),
    (r"\bPROTOCOL\b", "no name of a document that is not in the repository"),
    (r'"""See `[\w.]+`\.?"""', "nothing: inherit explicitly and mark the method with @override"),
]
PATTERNS = [(re.compile(pattern), better) for pattern, better in REPLACED]


def findings(name: str, text: str) -> Iterator[str]:
    """One sentence for each replaced word of a file."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, better in PATTERNS:
            for found in pattern.finditer(line):
                yield f"{name}:{number}: {found[0]} → {better}"


def tracked() -> list[str]:
    """Names of the files to read, relative to the root."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = [name for name in listing.stdout.decode().split("\0") if name]
    return [
        name
        for name in names
        if Path(name).suffix in READ and name not in EXEMPT and not name.endswith(GENERATED)
    ]


def main(arguments: list[str]) -> int:
    """Reads the named folders, or all; prints the findings; exit status 1 when there are any."""
    chosen = [name for name in tracked() if not arguments or name.startswith(tuple(arguments))]
    found = 0
    for name in chosen:
        file = ROOT / name
        if not file.is_file():  # removed, not yet committed
            continue
        for sentence in findings(name, file.read_text(encoding="utf-8")):
            print(sentence)
            found += 1
    if found:
        print(f"{found} replaced words; say what stands behind the arrow")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
