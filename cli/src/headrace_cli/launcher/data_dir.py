"""What lies where under a fleet's data directory, and whether the directory can carry a fleet."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headrace_servicekit.folders import own_folder

from headrace_cli.errors import user_error

AUTHORITY = "ca.pem"
NEEDED_BYTES = 256 * 1024 * 1024  # the store's file, logs and one checkpoint of a small model
NEEDED_SHM_BYTES = 1024 * 1024 * 1024  # two policy versions of a small model in each of two services
LOG_BYTES = 16 * 1024 * 1024
UNIX_SOCKET_PATH_BYTES = 100


@dataclass(frozen=True)
class DataDir:
    """A fleet's data directory; `root` is absolute."""

    root: Path

    @classmethod
    def at(cls, path: Path | str) -> DataDir:
        """The data directory at a path, which need not exist."""
        return cls(Path(os.path.expanduser(path)).absolute())

    @property
    def state_file(self) -> Path:
        return self.root / "fleet.json"

    @property
    def lock_file(self) -> Path:
        return self.root / "fleet.lock"

    @property
    def token_file(self) -> Path:
        return self.root / "token"

    @property
    def http_token_file(self) -> Path:
        return self.root / "http-token"

    @property
    def tls(self) -> Path:
        """What clients of an encrypted HTTP API trust."""
        return self.root / "tls"

    @property
    def certificates(self) -> Path:
        """Folders with the files of each role of this host's processes."""
        return self.root / "certificates"

    @property
    def services_token_file(self) -> Path:
        """What services share beyond the loopback; `token_file`, which joins hosts, they do not have there."""
        return self.root / "services-token"

    @property
    def authority(self) -> Path | None:
        """What the certificate of the fleet's HTTP API comes from, where that is encrypted."""
        return file if (file := self.tls / AUTHORITY).is_file() else None

    @property
    def authority_keys(self) -> Path:
        """Where the key of the fleet's authority is: not below `root`, which every service has."""
        from headrace_servicekit.rpc.tls import keys_folder  # gRPC comes with it

        return keys_folder() / self.fleet_id

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def store(self) -> Path:
        return self.root / "redis"

    @property
    def profiles(self) -> Path:
        return self.root / "profiles"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def fleet_id(self) -> str:
        """Names this fleet on this host: one data directory, one user, one fleet."""
        digest = hashlib.sha256(os.fsencode(self.root.resolve())).hexdigest()[:12]
        return f"headrace-{os.getuid()}-{digest}"

    @property
    def short_folder(self) -> Path:
        """Where a socket goes whose path would be too long elsewhere."""
        return Path(tempfile.gettempdir()) / self.fleet_id

    def prepare(self, needed_bytes: int = NEEDED_BYTES) -> None:
        """Makes the directory; raises CommandError (exit code 2) when it cannot be written or is full."""
        where = str(self.root)
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self.root.chmod(0o700)
            probe = self.root / f".probe-{os.getpid()}"
            probe.write_bytes(b"headrace")
            probe.unlink()
            free = shutil.disk_usage(self.root).free
        except OSError as error:
            detail = error.strerror or "unknown reason"
            raise user_error(
                "--data-dir", f"{where} cannot be written ({detail})", "name a directory of yours"
            ) from error
        if free < needed_bytes:
            problem = f"{where} has {free >> 20} MiB free, a fleet needs {needed_bytes >> 20} MiB"
            raise user_error("--data-dir", problem, "free some space or name a directory on another disk")

    def log_file(self, name: str) -> Path:
        """The log of a process."""
        return self.logs / f"{name}.log"

    def set_big_log_aside(self, name: str) -> None:
        """Keeps a log that grows over many starts within bounds."""
        path = self.log_file(name)
        if path.exists() and path.stat().st_size > LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))

    def make_shared_memory(self, tmpfs: Path = Path("/dev/shm")) -> Path:
        """An empty folder for weights and trajectories, on a tmpfs when there is one with room."""
        roomy = os.access(tmpfs, os.W_OK) and shutil.disk_usage(tmpfs).free >= NEEDED_SHM_BYTES
        folder = tmpfs / self.fleet_id if roomy else self.root / "shm"
        shutil.rmtree(folder, ignore_errors=True)
        return own(folder)

    def socket_path(self, shared_memory: Path) -> Path:
        """Where the store listens; the kernel allows a unix socket's path 107 bytes."""
        inside = shared_memory / "store.sock"
        if len(os.fsencode(inside)) <= UNIX_SOCKET_PATH_BYTES:
            return inside
        return own(self.short_folder) / "store.sock"


def own(folder: Path) -> Path:
    """A folder of this user outside the data directory. Raises CommandError where it is not."""
    try:
        return own_folder(folder, "name another directory")
    except PermissionError as error:
        raise user_error("--data-dir", f"{folder} cannot be used", str(error.strerror)) from error
