"""Says whether a part with an environment of its own is needed: where its folder or its contract changed.

Where CI_BASE names a commit, as CI does with the one that landed last, git says what changed since. Elsewhere
`ci/passed.json` does: digests of the files with which these parts passed last, written by a part that passes where
CI=true, so that nothing was skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ci.running import ROOT

PASSED = ROOT / "ci" / "passed.json"


def reason_to_leave_out(name: str, inputs: Sequence[str], passed: Path = PASSED) -> str:
    """Why a part with these inputs (git's path specifications) is not needed; empty where it is."""
    base = os.environ.get("CI_BASE", "")
    if base and _git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}").returncode == 0:
        untracked = _git("ls-files", "--others", "--exclude-standard", "--", *inputs).stdout
        changed = bool(untracked) or _git("diff", "--quiet", base, "--", *inputs).returncode != 0
        return "" if changed else f"its files are those of {base[:12]}"
    digests = json.loads(passed.read_text(encoding="utf-8")) if passed.exists() else {}
    return "its files are those with which it passed last" if digests.get(name) == digest_of(inputs) else ""


def record_pass(name: str, inputs: Sequence[str], passed: Path = PASSED) -> None:
    """Writes down with which files a part passed; not outside CI, where what could not run may have been skipped."""
    if os.environ.get("CI") != "true":
        return
    digests = json.loads(passed.read_text(encoding="utf-8")) if passed.exists() else {}
    digests[name] = digest_of(inputs)
    passed.write_text(json.dumps(dict(sorted(digests.items())), indent=2) + "\n", encoding="utf-8")


def digest_of(inputs: Sequence[str]) -> str:
    """A digest of the names and contents of files of the working tree. Raises ValueError where inputs name none."""
    total = hashlib.sha256()
    for each in inputs:
        listed = _git(
            "ls-files", "--cached", "--others", "--exclude-standard", "--", each
        ).stdout.splitlines()
        names = sorted(name for name in set(listed) if (ROOT / name).is_file())
        if not names:
            raise ValueError(f"{each} names no file: a part's inputs are files and folders that there are")
        for name in names:
            total.update(f"{name} {hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:16]


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
