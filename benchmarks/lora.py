"""What training adapters alone costs against training all weights: `python benchmarks/lora.py`.

Each of the two takes steps of the trainer's own backend in a process of its own: the groups' micro-batches, the
optimizer step, and every weight of the new version cast as for publication. The model has SmolLM2-135M's shape, or is
`--model`, and computes in bf16 on `--threads` torch threads. The processes run one after the other: repeat it where
the machine has guests.

Prints one JSON line with `step_ratio`, seconds of a step with adapters over those of all weights (medians),
`memory_ratio`, the same of the process's peak of resident memory above what it was before the model was read, and both
sides' own figures. Of a version of a run with adapters, published merged or alone: bytes (`version_bytes_ratio`) and
seconds at the trainer's commit (`version_stage_ratio`), alone over merged; `merge_s`, in which a rollout merges.
`version_one_of_two_grpc`, `version_one_of_two_collective`: of a version with the adapters of two policies of which one
has learned, the bytes that a receiver of the version before is sent, over those of the version.
`engines_one_memory_gb`, `engines_each_memory_gb`: of two policies of one base in a rollout on the CPU, resident memory
with one built-in engine (`rollout.enable_lora`), and with an engine for each, after both have said something.
`sessions_shared_memory_gb`, `sessions_own_memory_gb`: of each of three sessions at once, with one base for all and with
one each: PSS above that before the model was read, shared memory aside, and the files on the tmpfs. A session is a
trainer that has published a step, and a built-in engine (`rollout.enable_lora`) that has answered, in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from _harness import emit, machine, say

if TYPE_CHECKING:
    from headrace_servicekit.weights.versions import StoredWeights

KINDS: dict[str, dict[str, Any] | None] = {"whole": None, "lora": {}}
ENGINES = ("engines_each", "engines_one")
"""Two policies of one base: with an engine each, and in one."""
SESSIONS = {"sessions_own": "session_own", "sessions_shared": "session_shared"}
"""Several sessions of one base, and the kind of each process."""
AT_ONCE, FEW = 3, 2
"""How many sessions, and answers in a step of each."""
GROUPS, SIZE, PROMPT, ANSWER = 4, 8, 40, (24, 40)
RANK = 16
WARM_UP = 1
CHILD_S = 1200.0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each kind")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--model", type=Path, help="a model directory; default: SmolLM2's shape at random")
    kinds = (*KINDS, "version", *ENGINES, *SESSIONS)
    parser.add_argument("--kind", choices=[*kinds, *SESSIONS.values()], help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=kinds, nargs="*", help="of these alone, without ratios")
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind == "version":
        print(json.dumps(version(options.model, options.steps, options.threads)))
        return
    if options.kind in SESSIONS:
        print(json.dumps(sessions(options.model, SESSIONS[options.kind], options.threads)))
        return
    if options.kind in SESSIONS.values():
        session(options.model, options.root, options.threads, shares=options.kind == "session_shared")
        return
    if options.kind in ENGINES:
        print(json.dumps(policies(options.model, options.kind == "engines_one", options.threads)))
        return
    if options.kind:
        print(json.dumps(measure(options.model, options.kind, options.steps, options.threads)))
        return
    say(machine())
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        model = options.model or random_model(Path(folder))
        wanted = options.only or kinds
        found = {kind: in_child(model, kind, options.steps, options.threads) for kind in wanted}
    say(f"at the end: {machine()}")
    own = {f"{kind}_{name}": value for kind, figures in found.items() for name, value in figures.items()}
    emit("lora", own if options.only else ratios(found) | own)


def ratios(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """Adapters over all weights."""
    adapters, whole = found["lora"], found["whole"]
    version = found["version"]
    return {
        "step_ratio": adapters["step_s"] / whole["step_s"],
        "memory_ratio": adapters["peak_gb"] / whole["peak_gb"],
        "version_bytes_ratio": version["adapter_bytes"] / version["merged_bytes"],
        "version_stage_ratio": version["adapter_stage_s"] / version["merged_stage_s"],
    }


def random_model(directory: Path) -> Path:
    """SmolLM2-135M's shape with random weights."""
    from prefix import write_model

    return write_model(directory)


def in_child(model: Path, kind: str, steps: int, threads: int) -> dict[str, float]:
    """What a process of its own measures."""
    command = [sys.executable, __file__, "--model", str(model), "--kind", kind]
    done = subprocess.run(
        [*command, "--steps", str(steps), "--threads", str(threads)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{kind}: {done.stderr.strip()[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    say(f"{kind}: {figures}")
    return figures


def measure(model: Path, kind: str, steps: int, threads: int) -> dict[str, float]:
    """Median seconds of a step, and 10^9 bytes of memory at most."""
    import torch
    from _gradient import Accumulation, synthetic_group
    from headrace_modelkit.loading import load_architecture
    from headrace_schema.sections.generating import ModelSection
    from headrace_trainer.group.forming import join_trainer_group

    torch.set_num_threads(threads)
    vocabulary = int(load_architecture(ModelSection(path=str(model))).vocab_size)
    made = [synthetic_group(each, SIZE, ANSWER, vocabulary, given=PROMPT) for each in range(GROUPS)]
    before = peak_bytes()
    trainer_group = join_trainer_group(1, 0, 1, "", 30.0, torch.device("cpu"))
    accumulation = Accumulation(model, "bfloat16", trainer_group, SIZE, groups=GROUPS, lora=KINDS[kind])
    seconds = []
    for _ in range(WARM_UP + steps):
        started = time.monotonic()
        accumulation.step(made)
        seconds.append(time.monotonic() - started)
    trainer_group.leave()
    return {"step_s": median(seconds[WARM_UP:]), "peak_gb": (peak_bytes() - before) / 1e9}


def version(model: Path, steps: int, threads: int) -> dict[str, float]:
    """Bytes of a version with adapters, published merged or alone, median seconds of its cast, and of a merge."""
    import torch
    from headrace_rollout.engines.merging import adapted, merged_parts
    from headrace_rollout.wire import weights_of
    from headrace_schema.openings import TrainerConfig
    from headrace_servicekit.weights.store import WeightStore
    from headrace_servicekit.weights.versions import BASE_NUMBER, base_name
    from headrace_trainer.group.forming import join_trainer_group
    from headrace_trainer.learning.step import Version
    from headrace_trainer.ranks.rank import Rank
    from headrace_trainer.ranks.rounds import Rounds
    from headrace_trainer.versions.versions import RunVersions

    torch.set_num_threads(threads)
    own = {"path": str(model), "dtype": "bfloat16"}
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-", dir="/dev/shm") as folder:
        store = WeightStore(Path(folder), "trainer")
        for lora in ("merged", "adapter"):
            config = {"model": own, "algorithm": {}, "trainer": {"lora": {}}, "weights": {"lora": lora}}
            trainer_group = join_trainer_group(1, 0, 1, "", 30.0, torch.device("cpu"))
            rank = Rank(TrainerConfig.model_validate(config), trainer_group)
            rounds = Rounds(rank, holds_lease=lambda: True, deadlines=False)
            rounds.restore("", 1, None)
            versions, seconds = RunVersions(store, lora, rank), []
            for number in range(1, WARM_UP + steps + 1):
                digest = versions.stage(rounds, number)
                published = versions.publish(rounds, Version(number, number - 1, number, digest))
                seconds.append(published.cast_seconds)
            stored = store.get(lora, number)
            figures[f"{lora}_bytes"] = stored.manifest.size_bytes
            figures[f"{lora}_stage_s"] = median(seconds[WARM_UP:])
            trainer_group.leave()

        def weights(found: StoredWeights) -> Any:
            return weights_of(found.manifest, found.body)

        whole = adapted(weights(store.get(base_name(lora), BASE_NUMBER)), weights(stored), {"": 2.0}).of("")
        seconds = []
        for _ in range(WARM_UP + steps):
            started = time.monotonic()
            merged_parts(whole)
            seconds.append(time.monotonic() - started)
        figures["merge_s"] = median(seconds[WARM_UP:])
        del whole
        figures |= asyncio.run(one_of_two(stored, Path(folder)))
        store.close()
    return figures


async def one_of_two(adapters: StoredWeights, folder: Path) -> dict[str, float]:
    """Bytes over those of the version, for each way, of which one policy's adapters are other ones than before."""
    from headrace.common.v1 import weights_pb2_grpc
    from headrace_modelkit.broadcasting import Broadcasts
    from headrace_servicekit.rpc.server import GrpcServer
    from headrace_servicekit.weights.receiving import receive_weights, ways_of
    from headrace_servicekit.weights.serving import WeightServicer
    from headrace_servicekit.weights.store import WeightStore

    run, figures, server = "runs/two", {}, GrpcServer("127.0.0.1:0", token=None)
    trainer = WeightStore(folder, "two")
    add = weights_pb2_grpc.add_WeightServiceServicer_to_server
    server.add_service(add, WeightServicer(trainer, Broadcasts()), "headrace.common.v1.WeightService")
    trainer.address = await server.start()
    receivers = {name: WeightStore(folder / name, name) for name in ("grpc", "collective")}
    for number in (1, 2):
        kinds = [(each.name, each.data_type, tuple(each.shape)) for each in adapters.manifest.entries]
        own = [(f"{policy}{name}", kind, shape) for policy in ("", "other/") for name, kind, shape in kinds]
        pending = trainer.begin(run, number, own)
        with pending.whole() as body:
            body[: len(adapters.body)] = adapters.body
            body[len(adapters.body) :] = bytes([number]) * len(adapters.body)
        described = pending.seal(number - 1, number)
        for name, store in receivers.items():
            ways = ways_of((name,), groups=Broadcasts())
            source = trainer.source(run, number)
            source.receivers = 1
            found = await receive_weights(store, run, *described, [source], token=None, ways=ways)
            figures[f"one_of_two_{name}"] = found.bytes_moved / len(found.body)
    await server.drain(0)
    for store in (trainer, *receivers.values()):
        store.close()
    return figures


def policies(model: Path, one: bool, threads: int) -> dict[str, float]:
    """Resident memory of two policies' engines, above what it was before the frozen weights were read."""
    import torch
    from headrace_modelkit.presets.tiny import character_tokenizer
    from headrace_modelkit.tokenizer import TextCodec
    from headrace_rollout.engines.base import EngineConfig, Policy, WeightEntry, Weights
    from headrace_rollout.engines.merging import adapted
    from headrace_rollout.engines.samples import Distribution, Group, Sample, Stream, TrajectoryUpdate
    from headrace_rollout.engines.transformers.engine import TransformersEngine
    from headrace_rollout.runs.policy_files import read_policy
    from headrace_rollout.wire import weights_of
    from headrace_schema.openings import RolloutConfig
    from headrace_schema.sections.generating import ModelSection
    from headrace_servicekit.memory.allocator import resident_bytes

    torch.set_num_threads(threads)
    section = ModelSection(path=str(model), dtype="bfloat16", max_context=512)
    names, tokenizer = {"": RANK, "other": RANK}, character_tokenizer()
    codec = TextCodec(tokenizer, frozenset({tokenizer.eos_token_id}), tokenizer.pad_token_id)
    before = resident_bytes()
    base = weights_of(*read_policy(RolloutConfig(model=section), "", ""))
    entries, body = [], bytearray()
    for policy, weight in ((policy, each) for policy in names for each in base.entries):
        if weight.name.endswith("proj.weight"):
            outputs, inputs = weight.shape
            for part, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
                data = (torch.randn(shape) * 0.01).numpy().tobytes()
                name = f"{policy}/{weight.name}.{part}" if policy else f"{weight.name}.{part}"
                entries.append(WeightEntry(name, "float32", shape, len(body), len(data), ""))
                body += data
    whole = adapted(base, Weights(tuple(entries), memoryview(bytes(body))), dict.fromkeys(names, 2.0))
    del body
    config = EngineConfig(section, codec, GROUPS * SIZE, adapters=names if one else {})
    engines = [TransformersEngine(config) for _ in range(1 if one else len(names))]

    async def say_something() -> float:
        for engine, name in zip(engines, names, strict=False):
            await engine.install(Policy(1, "v"), whole if one else whole.of(name))
        started = time.monotonic()
        for index, name in enumerate(names):
            ended: queue.Queue[list[TrajectoryUpdate]] = queue.Queue()
            own = name if one else ""
            stream = Stream(1, Distribution(), ANSWER[1], 1, ended.put, say, adapter=own)
            group = Group(0, list(range(3, 3 + PROMPT)), [Sample(each, 1) for each in range(SIZE)])
            await engines[0 if one else index].submit(stream, [group])
            left = SIZE
            while left:
                left -= len(await asyncio.to_thread(ended.get))
        return time.monotonic() - started

    spent = asyncio.run(say_something())
    return {"memory_gb": (resident_bytes() - before) / 1e9, "answers_s": spent}


def sessions(model: Path, kind: str, threads: int) -> dict[str, float]:
    """Memory of several sessions, started one after another and there at the same time, over how many they are."""
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-", dir="/dev/shm") as folder:
        command = [sys.executable, __file__, "--model", str(model), "--threads", str(threads)]
        command += ["--kind", kind, "--root", folder]
        children = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(AT_ONCE)
        ]
        try:
            for child in children:
                told(child)
            before = own_bytes(children, Path(folder))
            for child in children:
                print("go on", file=child.stdin, flush=True)
                told(child)
            return {"memory_gb": (own_bytes(children, Path(folder)) - before) / AT_ONCE / 1e9}
        finally:
            for child in children:
                child.kill()
                child.communicate()


def told(child: subprocess.Popen[str]) -> None:
    """Waits for a line of a child. Raises RuntimeError where it ends instead."""
    assert child.stdout is not None
    if not child.stdout.readline():
        raise RuntimeError(f"a session ended with {child.wait()}")


def own_bytes(children: list[subprocess.Popen[str]], folder: Path) -> int:
    """Memory of processes by their proportional set size, but for shared memory, of which the files count."""
    files = {found.st_ino: 512 * found.st_blocks for path in folder.rglob("*") if (found := path.stat())}
    size = sum(files.values())
    for child in children:
        lines = Path(f"/proc/{child.pid}/smaps_rollup").read_text().splitlines()[1:]
        figures = {words[0]: 1024 * int(words[1]) for words in map(str.split, lines)}
        size += figures["Pss_Anon:"] + figures["Pss_File:"]
    return size


def session(model: Path, root: Path, threads: int, *, shares: bool) -> None:
    """A trainer with adapters that takes a step and publishes it, and an engine that answers with it; then it waits."""
    import torch
    from _gradient import Accumulation, synthetic_group
    from headrace_modelkit.loading import load_architecture
    from headrace_modelkit.presets.tiny import character_tokenizer
    from headrace_modelkit.tokenizer import TextCodec
    from headrace_rollout.engines.base import EngineConfig, Policy
    from headrace_rollout.engines.merging import adapted
    from headrace_rollout.engines.samples import Distribution, Group, Sample, Stream, TrajectoryUpdate
    from headrace_rollout.engines.transformers.engine import TransformersEngine
    from headrace_rollout.engines.weight_memory import return_to_system
    from headrace_rollout.wire import weights_of
    from headrace_schema.sections.generating import ModelSection
    from headrace_servicekit.weights.store import WeightStore
    from headrace_servicekit.weights.versions import BASE_NUMBER, base_name
    from headrace_trainer.group.forming import join_trainer_group
    from headrace_trainer.learning.step import Version
    from headrace_trainer.versions.versions import RunVersions

    torch.set_num_threads(threads)
    name, store = "runs/session", WeightStore(root, f"trainer-{os.getpid()}")
    trainer_group = join_trainer_group(1, 0, 1, "", 30.0, torch.device("cpu"))
    print("ready", flush=True)
    sys.stdin.readline()
    vocabulary = int(load_architecture(ModelSection(path=str(model))).vocab_size)
    bases = store.bases if shares else None
    accumulation = Accumulation(model, "bfloat16", trainer_group, FEW, lora={"rank": RANK}, bases=bases)
    accumulation.step([synthetic_group(0, FEW, ANSWER, vocabulary, given=PROMPT)])
    rounds = accumulation.rounds
    versions = RunVersions(store, name, rounds.rank)
    versions.publish(rounds, Version(2, 1, 1, versions.stage(rounds, 2)))

    base, adapters = (store.get(each, number) for each, number in ((base_name(name), BASE_NUMBER), (name, 2)))
    scales = dict(adapters.manifest.adapter.scales)
    whole = adapted(
        weights_of(base.manifest, base.body), weights_of(adapters.manifest, adapters.body), scales
    )
    tokenizer = character_tokenizer()
    codec = TextCodec(tokenizer, frozenset({tokenizer.eos_token_id}), tokenizer.pad_token_id)
    section = ModelSection(path=str(model), dtype="bfloat16", max_context=512)
    engine = TransformersEngine(EngineConfig(section, codec, FEW, adapters={"": RANK}))
    ended: queue.Queue[list[TrajectoryUpdate]] = queue.Queue()

    async def answer() -> None:
        await engine.install(Policy(2, "v"), whole)
        stream = Stream(2, Distribution(), ANSWER[1], 1, ended.put, say)
        prompt = list(range(3, 3 + PROMPT))
        await engine.submit(stream, [Group(0, prompt, [Sample(each, 1) for each in range(FEW)])])
        left = FEW
        while left:
            left -= len(await asyncio.to_thread(ended.get))

    asyncio.run(answer())
    return_to_system()
    print("answered", flush=True)
    sys.stdin.readline()


def peak_bytes() -> int:
    """The largest resident memory that this process has had. getrusage counts the parent's in."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
