"""What the endpoint for agents, and a turn with an environment, cost beside the engine: `python benchmarks/agents.py`.

The tiny model on the engine `transformers`, one torch thread. Sessions speak several turns at once: over HTTP from a
process of their own, then with environments of a simulator that answer at once. What the engine was asked meanwhile it
is then asked again, alone, so that both sides sample the same tokens from the same contexts; turn about, and the median
of the turns counts.

Prints one JSON line with `endpoint_overhead_ms`, how much longer the whole took over HTTP, divided by its requests;
`turn_overhead_ms`, the same of turns with environments; and `prefix_reuse`, the part of the contexts, behind what is
new in them, that the engine did not compute again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from _harness import emit, free_port, machine, say

ENVIRONMENT = """
class Talk:
    def reset(self, seed, item):
        self.turn = 0
        return [{"role": "user", "content": f"{seed} + 1 ="}]

    def step(self, message):
        self.turn += 1
        return [{"role": "user", "content": "+ 1 ="}], 0.0, False
"""
TASK = "talk.py:Talk"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=32, help="conversations at once")
    parser.add_argument("--turns", type=int, default=4, help="turns of each")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a turn at most")
    parser.add_argument("--repetitions", type=int, default=5, help="measured turns about")
    parser.add_argument("--speak", nargs=2, metavar=("URL", "KEYS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.speak:
        url, keys = options.speak
        asyncio.run(speak(url, keys.split(","), options.turns))
        return
    say(machine())
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        asyncio.run(measure(Path(folder), options))


async def measure(folder: Path, options: argparse.Namespace) -> None:
    """Both comparisons, turn about."""
    bench = await Bench.start(folder, options)
    try:
        overheads: dict[str, list[float]] = {"endpoint": [], "turn": []}
        reuse = []
        for repetition in range(1 + options.repetitions):  # the first warms up
            for kind, run in (("endpoint", bench.over_http), ("turn", bench.with_environments)):
                took, speaker, prefilled = await run()
                asked = speaker.asked
                alone = await bench.alone(asked)
                if repetition:
                    overheads[kind].append(1000 * (took - alone) / len(asked))
                    say(f"{kind}: {len(asked)} turns in {took:.3f} s, the engine alone {alone:.3f} s")
                    reuse.append(reused(speaker, prefilled))
        figures = {f"{kind}_overhead_ms": median(found) for kind, found in overheads.items()}
        say(f"at the end: {machine()}")
        emit("agents", {**figures, "prefix_reuse": median(reuse)})
    finally:
        await bench.close()


def reused(speaker: Any, prefilled: int) -> float:
    """What was not computed again of contexts that were computed before; 1: all of them, 0: nothing.

    A turn's newest token is sampled, and was not computed yet when the turn ends.
    """
    asked = {(each.key, each.turn): each for each in speaker.asked}
    whole = known = 0
    for (key, turn), each in asked.items():
        whole += len(each.prompt_ids)
        if before := asked.get((key, turn - 1)):
            known += len(before.prompt_ids) + speaker.said[key, turn - 1] - 1
    return (whole - prefilled) / known


class Bench:
    """An engine with its endpoint, and a simulator beside it."""

    def __init__(self, options: argparse.Namespace, policy: Any) -> None:
        from headrace_rollout.endpoint.server import Endpoint

        self._options, self._policy, self._engine = options, policy, policy.engine
        self._endpoint = Endpoint("127.0.0.1", "127.0.0.1")
        self._simulator: subprocess.Popen[bytes] | None = None
        self._pools: Any = None
        self._pool: Any = None

    @classmethod
    async def start(cls, folder: Path, options: argparse.Namespace) -> Bench:
        """Builds the engine with the tiny model, and opens the environments."""
        import torch
        from headrace_modelkit.presets.tiny import write_tiny
        from headrace_modelkit.tokenizer import load_tokenizer
        from headrace_rollout.engines import ENGINES
        from headrace_rollout.engines.base import EngineConfig, Policy
        from headrace_rollout.runs.policy_files import read_policy
        from headrace_rollout.sessions.template import TurnTemplate
        from headrace_rollout.sessions.turns import Player
        from headrace_rollout.wire import weights_of
        from headrace_schema.openings import RolloutConfig
        from headrace_schema.sections.generating import PromptSection

        torch.set_num_threads(1)
        write_tiny(folder / "tiny")
        config = RolloutConfig.model_validate({"model": {"path": str(folder / "tiny"), "dtype": "float32"}})
        codec = load_tokenizer(config.model)
        engine = ENGINES.choose("transformers", {}).build(EngineConfig(config.model, codec, options.sessions))
        await engine.place((torch.device("cpu"),), 1)
        manifest, body = read_policy(config, "", "")
        await engine.install(Policy(1, manifest.digest), weights_of(manifest, body))
        bench = cls(options, Player(engine, codec, TurnTemplate(codec, PromptSection(chat=True))))
        await bench._open_environments(folder)
        return bench

    async def close(self) -> None:
        """Ends everything."""
        await self._endpoint.close()
        if self._pools is not None:
            await self._pools.close()
        if self._simulator is not None:
            self._simulator.kill()
            self._simulator.wait()
        await self._engine.close()

    async def over_http(self) -> tuple[float, Any, int]:
        """Seconds, the speaker that asked, and the tokens that the engine computed, of agents in another process."""
        from headrace_rollout.endpoint.answers import Terms
        from headrace_rollout.endpoint.session import AgentSession
        from headrace_rollout.engines.samples import SlotKey

        speaker, terms = self._speaker(), Terms("tiny", "hermes")
        sessions = [
            AgentSession(SlotKey(index, 0), 1, terms, speaker) for index in range(self._options.sessions)
        ]
        url = await self._endpoint.url()
        with ExitStack() as served:
            for session in sessions:
                served.enter_context(self._endpoint.serving(session))
            keys = ",".join(session.api_key for session in sessions)
            command = [sys.executable, __file__, "--turns", str(self._options.turns), "--speak", url, keys]
            agents = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            assert agents.stdin is not None and agents.stdout is not None
            await agents.stdout.readline()  # connected
            before, started = self._engine.figures.prefill_tokens, time.perf_counter()
            agents.stdin.write(b"go\n")
            if not await agents.stdout.readline():
                raise RuntimeError("the agents' process failed; its words are above")
            took = time.perf_counter() - started
            await agents.wait()
        prefilled = self._engine.figures.prefill_tokens - before
        await speaker.close()
        return took, speaker, prefilled

    async def with_environments(self) -> tuple[float, Any, int]:
        """The same of conversations with environments of a simulator."""
        from headrace.rollout.v1 import rollout_pb2
        from headrace_rollout.engines.samples import SlotKey
        from headrace_rollout.runs.opened import ConversationRun
        from headrace_rollout.sessions.drivers.environment import ConversationDriver, SessionSample
        from headrace_schema.openings import RolloutConfig

        count, ended, all_ended = self._options.sessions, list[Any](), asyncio.Event()

        def put(produced: Any) -> None:
            if isinstance(produced, Exception):
                raise produced
            ended.extend(produced)
            if len(ended) == count:
                all_ended.set()

        config = RolloutConfig.model_validate(
            {"model": {"path": "tiny"}, "workflow": "agentic", "environment": {"tasks": [TASK]}}
        )
        run = ConversationRun("tiny", config, self._engine, self._policy.codec, self._policy, self._pools)
        opening = rollout_pb2.GenerateOpen(pools=[self._pool])
        driver = ConversationDriver(run, opening, self._stream(), put)
        speaker = driver._speaker = self._speaker()
        starts = [rollout_pb2.EpisodeStart(task=TASK, seed=index) for index in range(count)]
        before, started = self._engine.figures.prefill_tokens, time.perf_counter()
        await driver.begin([SessionSample(SlotKey(index, 0), 1, start) for index, start in enumerate(starts)])
        await all_ended.wait()
        took = time.perf_counter() - started
        prefilled = self._engine.figures.prefill_tokens - before
        await driver.close()
        return took, speaker, prefilled

    async def alone(self, asked: Sequence[Any]) -> float:
        """Seconds of the engine for the same turns, each asked for as soon as the one before has ended."""
        speaker = self._speaker()

        async def converse(turns: Sequence[Any]) -> None:
            for each in turns:
                await speaker.say(each)

        by_sample: dict[Any, list[Any]] = {}
        for each in asked:
            by_sample.setdefault(each.key, []).append(each)
        started = time.perf_counter()
        await asyncio.gather(*map(converse, by_sample.values()))
        took = time.perf_counter() - started
        await speaker.close()
        return took

    def _stream(self) -> Any:
        from headrace_rollout.engines.samples import Distribution, Stream

        return Stream(
            1, Distribution(), self._options.tokens, 7, lambda _: None, say, stop=tuple("0123456789")
        )

    def _speaker(self) -> Any:
        """A Speaker that keeps what it was asked."""
        from headrace_rollout.sessions.turns import Speaker

        class Kept(Speaker):
            asked: list[Any]
            said: dict[Any, int]

            async def say(self, asked: Any) -> Any:
                self.asked.append(asked)
                turn = await super().say(asked)
                assert turn.whole is not None
                self.said[asked.key, asked.turn] = len(turn.whole.token_ids)
                return turn

        speaker = Kept(self._policy, self._stream())
        speaker.asked, speaker.said = [], {}
        return speaker

    async def _open_environments(self, folder: Path) -> None:
        from headrace.common.v1 import common_pb2
        from headrace.rollout.v1 import rollout_pb2
        from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
        from headrace_rollout.environments.pools import Pools
        from headrace_servicekit.memory.blobs import BlobReader
        from headrace_servicekit.rpc.client import dial

        (folder / "talk.py").write_text(ENVIRONMENT)
        address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "headrace_simulator", "--listen", address]
        command += ["--shm-dir", str(folder / "shm"), "--data-dir", str(folder / "data")]
        self._simulator = subprocess.Popen(  # noqa: ASYNC220  # it is started and not waited for
            command, cwd=folder, stderr=subprocess.DEVNULL
        )
        header = common_pb2.CommandHeader(
            run="runs/bench", coordinator_epoch=1, open_id=1, request_id=uuid.uuid4().hex
        )
        request = simulator_pb2.OpenPoolRequest(
            header=header,
            environment=simulator_pb2.Environment(backend="conversation", name=TASK),
            count=self._options.sessions,
            max_episode_steps=self._options.turns,
        )
        request.step_timeout.FromSeconds(30)
        async with dial(address, token=None) as channel:
            stub: Any = simulator_pb2_grpc.SimulatorServiceStub(channel)  # type: ignore[no-untyped-call]
            opened = await stub.OpenPool(request, timeout=120, wait_for_ready=True)
        pool = rollout_pb2.EnvironmentPool(
            address=address,
            header=header,
            pool=opened.pool,
            pool_incarnation=opened.pool_incarnation,
            count=self._options.sessions,
            task=TASK,
        )
        self._pools = Pools(BlobReader(folder / "shm", None), None, 30)
        self._pool = pool


async def speak(url: str, keys: Sequence[str], turns: int) -> None:
    """Agents that do nothing but speak, over one connection each: says when they are connected, and when done."""
    host, _, port = url.removeprefix("http://").removesuffix("/v1").partition(":")
    ends = [await asyncio.open_connection(host, int(port)) for _ in keys]
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

    async def agent(index: int, key: str) -> None:
        reader, writer = ends[index]
        messages = [{"role": "user", "content": f"{index} + 1 ="}]
        for _ in range(turns):
            body = json.dumps({"model": "tiny", "messages": messages}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            answered = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(answered.partition("content-length: ")[2].partition("\r\n")[0])
            found = json.loads(await reader.readexactly(size))
            messages += [found["choices"][0]["message"], {"role": "user", "content": "+ 1 ="}]
        writer.close()

    await asyncio.gather(*(agent(index, key) for index, key in enumerate(keys)))
    print("done", flush=True)


if __name__ == "__main__":
    main()
