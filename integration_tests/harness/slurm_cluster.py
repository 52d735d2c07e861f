"""A real Slurm on this machine: munged, slurmctld and a slurmd in each of several hosts of `harness.hosts`.

The nodes share this machine's files and nothing else: each has a network and a /dev/shm of its own. Their GPUs are
plain files, which Slurm counts and hands out and nothing computes on.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from harness.hosts import BOOT_ID, Host, can_make_hosts, hosts
from harness.processes import ROOT, clean_environment, mentioning
from harness.waiting import wait_for

CGROUPS = Path("/sys/fs/cgroup")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "nsenter")
MUNGE_FILES = {
    "key-file": "key",
    "socket": "socket",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}
KILL_WAIT_S = 30
"""From SIGTERM to SIGKILL of what Slurm ends: its own default."""
REQUEUE_S = 40
"""Until a job that is queued again may start, and so long a step may take to begin. Slurm's default is 120."""
CONF = """
ClusterName=headrace
SlurmctldHost={machine}({control})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire={requeue_s}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/affinity,task/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait={kill_wait_s}
MinJobAge=300
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=100000
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{parameters}
{nodes}
PartitionName=work Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 OverSubscribe=NO
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=10 OverSubscribe=NO
"""


def why_not() -> str:
    """Why this machine cannot run a Slurm of ours, which is installed where it can be; "" where it can."""
    if not can_make_hosts():
        return "Slurm's nodes need root and network namespaces"
    if not all(os.access(CGROUPS / name, os.W_OK) for name in ("freezer", "cpuset", "memory")):
        return f"Slurm's nodes need control groups of version 1 in {CGROUPS}"
    if not _are_there() and shutil.which("apt-get"):
        subprocess.run(["sh", "ci/apt.sh", "slurm-wlm", "munge"], cwd=ROOT, check=False, timeout=300)
    return "" if _are_there() else "install Slurm (Debian: sh ci/apt.sh slurm-wlm munge)"


def _are_there() -> bool:
    return all(shutil.which(name) for name in PROGRAMS)


class Slurm:
    """A cluster whose commands are run as a user of its controller's host runs them."""

    def __init__(self, folder: Path, control: Host, nodes: Sequence[Host]) -> None:
        self.folder, self.control, self.nodes = folder, control, nodes
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, gpus: int) -> None:
        """Writes the configuration and starts the daemons; returns once all nodes are idle."""
        self._configure(gpus)
        self._run_munged()
        self._begin("slurmctld", *self.command("slurmctld", "-D", "-c"))
        for node in self.nodes:
            self.begin_node(node)
        wait_for(lambda: self.states() == ["idle"] * len(self.nodes), f"idle nodes; see {self.folder}", 60)

    def begin_node(self, node: Host) -> None:
        """Starts the slurmd of a node, in a mount namespace with an empty /dev/shm and a name of its cores."""
        own = self.folder / f"{node.name}.boot-id"
        own.write_text(node.name)
        private = f"hostname {node.name} && mount -t tmpfs tmpfs /dev/shm && mount --bind {own} {BOOT_ID} && "
        daemon = f"exec nsenter --net=/run/netns/{node.namespace} slurmd -D -N {node.name}"
        self._begin(node.name, "unshare", "--mount", "--uts", "sh", "-c", private + daemon)

    def _begin(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                words, env=self.environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def _configure(self, gpus: int) -> None:
        for name in ("state", "home", *(f"spool-{node.name}" for node in self.nodes)):
            (self.folder / name).mkdir()
        described = [
            f"NodeName={node.name} NodeAddr={node.address} NodeHostname={node.name} CPUs=2 RealMemory=4000 "
            f"Gres=gpu:{gpus} State=UNKNOWN"
            for node in self.nodes
        ]
        text = CONF.format(
            machine=socket.gethostname(),
            control=self.control.address,
            folder=self.folder,
            kill_wait_s=KILL_WAIT_S,
            requeue_s=REQUEUE_S,
            parameters="CommunicationParameters=EnableIPv6" if ":" in self.control.address else "",
            nodes="\n".join(described),
        )
        (self.folder / "slurm.conf").write_text(text)
        for number in range(gpus):
            (self.folder / f"gpu{number}").touch()
        files = f"Name=gpu File={self.folder}/gpu[0-{gpus - 1}]\n" if gpus else ""
        (self.folder / "gres.conf").write_text(files)
        cgroup = (
            f"CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint={CGROUPS}\nConstrainCores=yes\n"
        )
        (self.folder / "cgroup.conf").write_text(cgroup)

    def _run_munged(self) -> None:
        own = self.folder / "munge"
        own.mkdir(mode=0o755)
        (own / "key").write_bytes(os.urandom(128))
        (own / "key").chmod(0o400)
        places = [f"--{name}={own / file}" for name, file in MUNGE_FILES.items()]
        self._begin("munged", "munged", "--foreground", "--force", *places)
        wait_for(lambda: (own / "socket").is_socket(), "munged", 20)

    def environment(self, **more: str) -> dict[str, str]:
        """Of a user's commands."""
        kept = {key: value for key, value in clean_environment().items() if not key.startswith("SLURM")}
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf"), **more}

    def command(self, *words: str) -> list[str]:
        """A command in the network of the controller's host: `ip netns exec` would hide the control groups."""
        return ["nsenter", f"--net=/run/netns/{self.control.namespace}", *words]

    def run(
        self, *words: str, timeout_s: float = 60.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command there."""
        return subprocess.run(
            self.command(*words),
            env=self.environment(**environment),
            cwd=self.folder / "home",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )

    def said(self, *words: str) -> str:
        """What a command prints; fails the test unless it succeeds."""
        done = self.run(*words)
        assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def states(self) -> list[str]:
        """Of the nodes, in their order."""
        done = self.run("sinfo", "-N", "-h", "-p", "work", "-o", "%N %t")
        found = dict(line.split() for line in done.stdout.splitlines())
        return [found.get(node.name, "") for node in self.nodes]

    def job(self, job: str) -> dict[str, str]:
        """What scontrol knows of a job."""
        return dict(re.findall(r"(\w+(?:[:/]\w+)*)=(\S*)", self.said("scontrol", "show", "job", job)))

    def shared_memory(self, node: Host) -> list[str]:
        """What of fleets lies in a node's /dev/shm."""
        seen = Path(f"/proc/{self._daemons[node.name].pid}/root/dev/shm")
        return [path.name for path in seen.glob("headrace-*")]

    def kill_node(self, node: Host) -> None:
        """What a machine that loses its power leaves: nothing of it lives, and nobody is told."""
        node.cut_off()
        netns = os.stat(f"/run/netns/{node.namespace}").st_ino
        for process in psutil.process_iter():
            try:
                if os.stat(f"/proc/{process.pid}/ns/net").st_ino == netns:
                    process.kill()
            except (OSError, psutil.Error):
                continue
        self._daemons.pop(node.name).wait(20)

    def stop(self) -> None:
        """Ends all jobs, then the daemons, and what they have left."""
        self.run("scancel", "--user=root")
        if not self._jobs_end():
            self.run("scancel", "--signal=KILL", "--full", "--user=root")
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons.values()):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)
        for process in mentioning(str(self.folder)):
            process.kill()

    def _jobs_end(self) -> bool:
        try:
            wait_for(lambda: not self.run("squeue", "-h").stdout.strip(), "the jobs to end", KILL_WAIT_S + 20)
        except AssertionError:
            return False
        return True


@contextmanager
def slurm(folder: Path, *names: str, gpus: int = 0, ipv6: bool = False) -> Iterator[Slurm]:
    """A cluster with nodes of these names; on leaving, its jobs are ended, and all its processes are gone."""
    with hosts(folder / "hosts", "control", *names, ipv6=ipv6) as (control, *nodes):
        cluster = Slurm(folder / "slurm", control, nodes)
        (folder / "slurm").mkdir()
        try:
            cluster.start(gpus)
            yield cluster
        finally:
            cluster.stop()
