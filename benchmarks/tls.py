"""What certificates between services cost: `python benchmarks/tls.py`.

By turns, on the same cores: the tiny model trained on a fleet without encryption and on one with it (`up --tls`), and a
version of weights fetched by gRPC from another process without and with it. Prints one JSON line:
`step_with_tls_vs_without` (median seconds of a step), `weights_by_grpc_vs_plain` (median rate) and `authorise_us`
(CPU time of asking whose a request is and whether it may: by `_authorising.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from _authorising import authorise_us
from _harness import emit, machine, say
from headrace.client import Client
from headrace.common.v1 import common_pb2, weights_pb2_grpc
from headrace_servicekit.rpc import tls
from headrace_servicekit.rpc.certificates import make_authority, make_certificate
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.weights.receiving import receive_weights
from headrace_servicekit.weights.serving import WeightServicer
from headrace_servicekit.weights.store import WeightStore

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integration_tests"))

from harness.fleet import Fleet  # noqa: E402
from harness.processes import run_python  # noqa: E402
from harness.specs import small_spec  # noqa: E402

RUN = "runs/r"
SETTLED = 5
"""The first steps of a run are left out."""


class EncryptedFleet(Fleet):
    """A fleet with `--tls`, whose API is asked by https."""

    def up(self) -> None:
        """As of a plain one."""
        super().up()
        self.url = self.url.replace("http:", "https:")
        self.client = Client(self.url, self.token, ca_file=self.data_dir / "tls" / "ca.pem")


async def serve(folder: Path, size: int) -> None:
    """A trainer's weights, until standard input ends."""
    store = WeightStore(folder, "trainer", "")
    pending = store.begin(RUN, 1, [("a", common_pb2.DATA_TYPE_UINT8, (size,))])
    pending.buffer("a")[:] = os.urandom(1 << 20) * (size >> 20)
    pending.seal(0, 0)
    server = GrpcServer("127.0.0.1:0", token="t", instance="trainer")
    add = weights_pb2_grpc.add_WeightServiceServicer_to_server
    server.add_service(add, WeightServicer(store), "headrace.common.v1.WeightService")
    held = store.get(RUN, 1)
    print(await server.start(), held.version.SerializeToString().hex(), flush=True)
    print(held.manifest.SerializeToString().hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.drain(0)
    store.close()


class Trainer:
    """That process; `encrypted` with certificates of `folder`."""

    def __init__(self, folder: Path, size: int, encrypted: bool) -> None:
        self._folder, self._encrypted = folder, encrypted
        own = {tls.VARIABLE: str(folder / "trainer")} if encrypted else {}
        place = folder / ("encrypted" if encrypted else "plain")
        command = [sys.executable, __file__, "--serve", str(place), "--mib", str(size >> 20)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **own}
        )
        assert self._process.stdout is not None
        self._address, version = self._process.stdout.readline().split()
        self._version = common_pb2.PolicyVersion.FromString(bytes.fromhex(version))
        manifest = self._process.stdout.readline()
        self._manifest = common_pb2.WeightManifest.FromString(bytes.fromhex(manifest))

    def seconds(self) -> float:
        """Of one version, into a store of another host."""
        os.environ.pop(tls.VARIABLE, None)
        if self._encrypted:
            os.environ[tls.VARIABLE] = str(self._folder / "rollout")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as there:
            store = WeightStore(Path(there), "rollout", "")
            by_grpc = [common_pb2.WEIGHT_TRANSPORT_GRPC]
            source = common_pb2.WeightSource(address=self._address, incarnation="trainer", transports=by_grpc)
            began = time.perf_counter()
            asyncio.run(receive_weights(store, RUN, self._version, self._manifest, [source], token="t"))
            took = time.perf_counter() - began
            store.close()
        os.environ.pop(tls.VARIABLE, None)
        return took

    def end(self) -> None:
        """Ends the process."""
        self._process.communicate("", timeout=20)


def weights(size: int, turns: int) -> float:
    """The rate with encryption over that without."""
    took: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_authority(folder / "authority", "head")
        for role in ("trainer", "rollout"):
            make_certificate(folder / "authority", folder / role, role, "here")
        trainers = {encrypted: Trainer(folder, size, encrypted) for encrypted in took}
        for turn in range(turns + 1):
            for encrypted in (False, True) if turn % 2 else (True, False):
                seconds = trainers[encrypted].seconds()
                if turn:  # The first one warms up.
                    took[encrypted].append(seconds)
        for each in trainers.values():
            each.end()
    rates = {encrypted: (size >> 20) / median(found) for encrypted, found in took.items()}
    say(f"{rates[False]:.0f} MiB/s plain, {rates[True]:.0f} MiB/s encrypted; {machine()}")
    return rates[True] / rates[False]


def steps(count: int, turns: int) -> float:
    """Seconds of a step with encryption over those without."""
    took: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "tiny"
        run_python("-m", "headrace_modelkit.presets.tiny", model)
        with (
            Fleet(folder / "plain", "--simulator", "0") as plain,
            EncryptedFleet(folder / "encrypted", "--simulator", "0", "--tls") as encrypted,
        ):
            for turn in range(turns):
                for with_tls in (False, True) if turn % 2 else (True, False):
                    fleet = encrypted if with_tls else plain
                    run = fleet.succeed(fleet.submit(small_spec(model, steps=count, data__heldout=0)), 600)
                    took[with_tls] += [float(step.wall_s) for step in fleet.client.metrics(run.id)][SETTLED:]
    say(f"{median(took[False]):.4f} s a step plain, {median(took[True]):.4f} s encrypted; {machine()}")
    return median(took[True]) / median(took[False])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="size of a version")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve, options.mib << 20))
        return
    say(machine())
    emit(
        "tls",
        {
            "authorise_us": authorise_us(),
            "weights_by_grpc_vs_plain": weights(options.mib << 20, options.turns),
            "step_with_tls_vs_without": steps(options.steps, options.turns),
        },
    )


if __name__ == "__main__":
    main()
