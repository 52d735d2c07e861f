"""The scripts of a task in Harbor's form: tests/test.sh, which writes a reward file, and solution/solve.sh."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace_containers.provider import BadPath, Container, File
from headrace_containers.tasks.task import ROOT, Judged

LOGS = "/logs/verifier"
REWARDS = (f"{LOGS}/reward.json", f"{LOGS}/reward.txt")
"""Where tests write the reward; the first that is there counts."""
_MOST_REWARD_BYTES = 1 << 16
_MOST_SAID = 4000


@dataclass(frozen=True)
class Script:
    """solution/solve.sh, with the files beside it."""

    files: tuple[File, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0

    def solve(self, container: Container, user: str, workdir: str) -> str:
        """Runs it in the working directory."""
        container.write(
            [File(f"/solution/{each.path}", each.data, each.mode) for each in self.files], user=ROOT
        )
        run = 'if [ -x "$0" ]; then exec "$0"; else exec sh "$0"; fi'
        ran = container.exec(
            ("sh", "-c", run, "/solution/solve.sh"),
            cwd=workdir,
            env=self.env,
            user=user,
            timeout_s=self.timeout_s,
        )
        said = (ran.stdout + ran.stderr).decode(errors="replace").strip()[-_MOST_SAID:]
        return f"{said} (exit code {ran.exit_code})"


@dataclass(frozen=True)
class HarborTests:
    """tests/test.sh, which writes a reward file."""

    files: tuple[File, ...]
    user: str = ROOT
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0

    def judge(self, container: Container, workdir: str) -> Judged:
        """Its folders are the tests' user's alone: code that runs as another one reads and writes none of them."""
        fresh = f"rm -rf /tests /logs/verifier && mkdir -p -m 700 /tests {LOGS} && chown {self.user} /tests {LOGS}"
        made = container.exec(("sh", "-c", fresh), cwd="/", user=ROOT)
        if made.exit_code:
            raise BadPath(f"/tests cannot be made: {made.stderr.decode(errors='replace')[-200:]}")
        container.write(
            [File(f"/tests/{each.path}", each.data, each.mode) for each in self.files], user=self.user
        )
        ran = container.exec(
            ("sh", "-c", "chmod u+x /tests/test.sh && exec /tests/test.sh"),
            cwd=workdir,
            env=self.env,
            user=self.user,
            timeout_s=self.timeout_s,
        )
        said = (ran.stdout + ran.stderr).decode(errors="replace")[-_MOST_SAID:]
        if ran.ended == "time":
            return Judged(said=f"{said}\nthe tests took longer than {self.timeout_s:g} s")
        for path in REWARDS:
            if text := read_file(container, path):
                rewards = _rewards(text, path)
                return (
                    Judged(rewards, said)
                    if rewards
                    else Judged(said=f"{said}\n{path} holds no finite numbers")
                )
        return Judged(said=f"{said}\nthe tests wrote no {' or '.join(REWARDS)}")


def _rewards(text: bytes, path: str) -> dict[str, float]:
    """Numbers by name, as Harbor reads them; none for anything else."""
    try:
        given = json.loads(text) if path.endswith(".json") else float(text)
        found = dict(given) if isinstance(given, dict) else {"reward": given}
    except (ValueError, TypeError):
        return {}
    right = all(isinstance(each, int | float) and math.isfinite(each) for each in found.values())
    return {str(name): float(each) for name, each in found.items()} if right else {}


def read_file(container: Container, path: str) -> bytes:
    """A small file; empty where it is not there."""
    try:
        return container.read(path, most_bytes=_MOST_REWARD_BYTES)
    except BadPath:
        return b""
