"""What a network between hosts costs: `python benchmarks/hosts.py`, as root, for network namespaces as hosts.

Each host's cable carries `--mbit` in each direction, and a packet is `--delay-ms` under way; a switch in user space
does both, as a kernel's `tc` may not know how to delay, and takes part of the cores.

Weights: a trainer's store on one host, and eight receivers on four others, which ask whom the coordinator would tell
them to ask. `fanout_vs_single` is the time until all have a version, verified, over that of one receiver alone;
`direct_vs_single` is the same where each host asks the trainer;
`weights_bytes_per_host` is what came over the busiest receiving cable, over the model's bytes.

Steps: the tiny model trained with trainer, rollout and reward on a host each, and on one host, in turns:
`three_hosts_vs_one` is the ratio of the median seconds of a step. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from _harness import emit, machine, say
from headrace.common.v1 import common_pb2
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.run.devices.leasing import sources_of

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integration_tests"))

from harness.hosts import Cable, Host, can_make_hosts, hosts  # noqa: E402
from harness.processes import clean_environment, run_python  # noqa: E402
from harness.specs import small_spec  # noqa: E402

GOALS = {"fanout_vs_single": 1.5, "weights_bytes_per_host": 1.05}
HOSTS, INSTANCES, PORT = ("b", "c", "d", "e"), 2, 7000
WARM_UP, SETTLED = 2, 5
COUNTS = ("rollout", "trainer", "reward", "simulator")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, default=1000.0, help="of each direction of a cable")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="from one host to another")
    parser.add_argument("--megabytes", type=int, default=64, help="of the model whose weights are sent")
    parser.add_argument("--versions", type=int, default=5, help="that are measured, of each kind")
    parser.add_argument("--steps", type=int, default=30, help="of each run; 0: weights alone")
    parser.add_argument("--turns", type=int, default=1, help="runs on three hosts and on one")
    options = parser.parse_args()
    if not can_make_hosts():
        raise SystemExit("network namespaces are made by root alone; run this script as root")
    say(machine())
    cable = Cable(options.mbit, options.delay_ms)
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        figures = weights(Path(folder), cable, options.megabytes << 20, options.versions)
        if options.steps:
            figures["three_hosts_vs_one"] = steps(Path(folder), cable, options.steps, options.turns)
    for name, goal in GOALS.items():
        say(f"{name}: {figures[name]:.3f}, {'met' if figures[name] <= goal else 'missed'} ({goal})")
    say(f"at the end: {machine()}")
    emit("hosts", figures)


class Peer:
    """A process of `_fanout.py` on a host."""

    def __init__(self, host: Host, port: int) -> None:
        self.host = host
        folder = f"/dev/shm/headrace-benchmark-{host.name}"
        words = (sys.executable, str(Path(__file__).with_name("_fanout.py")))
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", host.namespace, *words, f"{host.address}:{port}", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=clean_environment(),
            text=True,
        )
        self.folder = folder
        hello = self.answer()
        self.instance = InstanceState(
            f"{host.name}-{port}", hello["incarnation"], "rollout", host.name, hello["address"], [], {}
        )

    def ask(self, **words: Any) -> None:
        """Tells it to publish or to receive."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What it says; RuntimeError where it has ended."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process on {self.host.name} has ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def peers(made: Sequence[Host]) -> Iterator[tuple[Peer, list[Peer]]]:
    """The trainer's process, and those that receive."""
    started: list[Peer] = []
    try:
        started.append(Peer(made[0], PORT))
        started += [Peer(host, PORT + index) for host in made[1:] for index in range(INSTANCES)]
        yield started[0], started[1:]
    finally:
        for each in started:
            each.end()


def weights(folder: Path, cable: Cable, size: int, versions: int) -> dict[str, float]:
    """Versions for one receiver, for all, and for all from the trainer, in turns."""
    took: dict[str, list[float]] = {"single": [], "fanout": [], "direct": []}
    most = 0.0
    with hosts(folder, "head", *HOSTS, cable=cable) as made, peers(made) as (trainer, receivers):
        number = 0
        for turn in range(WARM_UP + versions):
            for kind in took:
                number += 1
                trainer.ask(number=number, bytes=size)
                published = trainer.answer()
                asked = receivers[:1] if kind == "single" else receivers
                before = {host.name: host.received_bytes() for host in made[1:]}
                seconds, fallbacks = _send(trainer, asked, published, chained=kind != "direct")
                if fallbacks:
                    say(f"{kind}: asked another source: {'; '.join(fallbacks)}")
                if turn >= WARM_UP:
                    took[kind].append(seconds)
                    if kind == "fanout":
                        came = max(host.received_bytes() - before[host.name] for host in made[1:])
                        most = max(most, came / size)
    bound = size * 8 / (cable.mbit * 1e6)
    say(f"{size >> 20} MiB, of which a cable takes {bound:.2f} s; median seconds of {versions} versions:")
    for kind, seconds_of in took.items():
        say(f"  {kind}: {median(seconds_of):.2f} ({min(seconds_of):.2f} to {max(seconds_of):.2f})")
    single = median(took["single"])
    return {
        "fanout_vs_single": median(took["fanout"]) / single,
        "direct_vs_single": median(took["direct"]) / single,
        "weights_bytes_per_host": most,
        "single_vs_cable": single / bound,
    }


def _send(
    trainer: Peer, receivers: Sequence[Peer], published: dict[str, Any], *, chained: bool
) -> tuple[float, list[str]]:
    """Seconds until all receivers have the version, and whom they asked in vain."""
    origin = common_pb2.WeightSource.FromString(base64.b64decode(published["source"]))
    origin.transports[:] = [common_pb2.WEIGHT_TRANSPORT_GRPC]
    instances = [each.instance for each in receivers]
    whom = sources_of(instances, [], origin, trainer.host.name) if chained else {}
    began = time.perf_counter()
    for each in receivers:
        sources = whom.get(each.instance.incarnation, [origin])
        texts = [base64.b64encode(source.SerializeToString()).decode() for source in sources]
        each.ask(version=published["version"], manifest=published["manifest"], sources=texts)
    answers = [each.answer() for each in receivers]
    return time.perf_counter() - began, [text for answer in answers for text in answer["fallbacks"]]


def steps(folder: Path, cable: Cable, count: int, turns: int) -> float:
    """Median seconds of a step on three hosts, over those on one."""
    model = folder / "tiny"
    run_python("-m", "headrace_modelkit.presets.tiny", model)
    found: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(turns):
        for apart in (True, False) if turn % 2 else (False, True):
            place = folder / f"{turn}-{apart}"
            place.mkdir()
            with hosts(place, *(("head", "b", "c") if apart else ("head",)), cable=cable) as made:
                found[apart] += _run(made, place, model, count)
        say(
            f"turn {turn + 1}: {median(found[False]):.3f} s a step on one host, {median(found[True]):.3f} on three"
        )
    return median(found[True]) / median(found[False])


def _run(made: Sequence[Host], folder: Path, model: Path, count: int) -> list[float]:
    """Seconds of the settled steps of one run, with a service on each host, or all on the only one."""
    head, others = made[0], made[1:]
    at = dict(zip(("rollout", "reward"), others, strict=False))
    here = ["trainer", *(kind for kind in ("rollout", "reward") if kind not in at)]
    head.json("up", "--listen", head.address, "--devices", "cpu:0,cpu:1", *_counts(here))
    for kind, host in at.items():
        token = host.data_dir / "head-token"
        shutil.copy(head.data_dir / "token", token)
        words = ("--name", host.name, "--token-file", str(token), "--devices", "cpu:1", *_counts([kind]))
        host.json("join", head.address, *words)
    spec = small_spec(
        model,
        steps=count,
        placement={"mode": "disaggregated"},
        algorithm={"prompts_per_step": 16, "group_size": 8},
        sampling={"max_new_tokens": 16},
        data__heldout=0,
        checkpoint={"enabled": False},
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(spec))
    run = head.json("run", "submit", str(folder / "run.yaml"))["id"]
    deadline = time.monotonic() + 600
    while not (now := head.json("run", "get", run))["finished_at"]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{run} did not end: {now['state']} {now['reason']}")
        time.sleep(1)
    if now["state"] != "SUCCEEDED":
        raise RuntimeError(f"{run} {now['state']}: {now['reason']}")
    lines = (head.data_dir / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [float(json.loads(line)["wall_s"]) for line in lines][SETTLED:]


def _counts(kinds: Sequence[str]) -> list[str]:
    return [word for kind in COUNTS for word in (f"--{kind}", str(int(kind in kinds)))]


if __name__ == "__main__":
    main()
