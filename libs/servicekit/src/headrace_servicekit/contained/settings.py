"""Whether this process contains users' code, what its workers may have, and which walls this machine gives them.

`HEADRACE_TRUST=contained` says so for a whole host (`headrace up --trust contained`).
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt

from headrace_servicekit.contained.groups import Bounds, Groups
from headrace_servicekit.contained.network import enter_network
from headrace_servicekit.contained.proxy import BadHost, Hosts
from headrace_servicekit.memory.capacity import host_memory

TRUST_VARIABLE, PREFIX = "HEADRACE_TRUST", "HEADRACE_CONTAINED_"
OPEN, CONTAINED = "open", "contained"
_TRIED_S = 60.0
FACET = "contained"
"""Facet of an instance's capabilities: the walls of its workers with users' code; absent where it contains none."""
FIX = (
    "start it as root, or allow this user namespaces (sysctl user.max_user_namespaces, "
    "kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container a seccomp profile with unshare and mount), or say "
    f"that users' code may have the network all the same: {PREFIX}NETWORK=best_effort"
)


def _words(given: Any) -> Any:
    return [each.strip() for each in given.split(",") if each.strip()] if isinstance(given, str) else given


class ContainedSettings(BaseModel):
    """Bounds of one worker with users' code; from the environment, `HEADRACE_CONTAINED_<FIELD>`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    processes: PositiveInt = Field(
        512, description="processes and threads of one worker, with all that it starts"
    )
    memory_bytes: PositiveInt = Field(
        default_factory=lambda: host_memory().total // 2,
        description="memory of one worker; default: half of the host's",
    )
    file_bytes: PositiveInt = Field(
        1 << 30,
        description="files of one worker at its home and in /tmp, /var/tmp and /dev/shm, which are memory of its own",
    )
    cores: PositiveFloat = Field(
        default_factory=lambda: max(1.0, (os.cpu_count() or 1) / 2),
        description="cores of one worker; default: half of the host's",
    )
    reach: Annotated[tuple[str, ...], BeforeValidator(_words)] = Field(
        (),
        description="hosts that users' code reaches by HTTP proxy: HOST, HOST:PORT, *.HOST, separated by commas",
    )
    network: Literal["required", "best_effort"] = Field(
        "required",
        description="best_effort: users' code has the host's network where it can have none of its own",
    )

    @property
    def bounds(self) -> Bounds:
        """Of one worker."""
        return Bounds(self.processes, self.memory_bytes, self.cores)


class NotContained(RuntimeError):
    """This machine cannot contain users' code; the sentence says what it lacks, and the fix."""


class Containment:
    """What the workers of this process are started with. Raises NotContained."""

    def __init__(self, settings: ContainedSettings) -> None:
        self.settings = settings
        try:
            self.hosts = Hosts(settings.reach, f"{PREFIX}REACH", everywhere=True)
        except BadHost as error:
            raise NotContained(f"{PREFIX}REACH: {error}") from error
        self.network = may_have_networks()
        if not self.network and settings.network == "required":
            raise NotContained(f"users' code can have no network of its own here: {FIX}")
        self.groups = Groups.find()
        if self.groups:
            atexit.register(self.groups.close)

    @property
    def walls(self) -> list[str]:
        """In words."""
        network = "no network" if self.network else "THE HOST'S NETWORK (best_effort)"
        bounds = str(self.groups) if self.groups else "limits of each process (no cgroup)"
        return [
            network,
            f"{bounds}: {self.settings.processes} processes, "
            f"{self.settings.memory_bytes / 2**30:.1f} GiB, {self.settings.cores:g} cores a worker",
        ]


def is_contained(given: str | None = None) -> bool:
    """Whether this process contains users' code. Raises NotContained for a level that is none."""
    level = os.environ.get(TRUST_VARIABLE, OPEN) if given is None else given
    if level not in (OPEN, CONTAINED):
        raise NotContained(f"{TRUST_VARIABLE}: {level[:40]!r} is no level; use {OPEN} or {CONTAINED}")
    return level == CONTAINED


def may_have_networks() -> bool:
    """Whether a process that this one starts may have a network of its own, tried in one."""
    tried = subprocess.run([sys.executable, "-P", "-m", __name__], timeout=_TRIED_S, check=False)
    return tried.returncode == 0


def _try() -> bool:
    from headrace_servicekit.process.confine import other_user
    from headrace_servicekit.process.mounts import Mounts

    if sys.platform != "linux" or Mounts.enter(other_user=bool(other_user())) is None:
        return False
    return enter_network()


if __name__ == "__main__":
    raise SystemExit(0 if _try() else 1)
