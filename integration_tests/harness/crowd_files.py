"""Made-up runs with files as a coordinator writes them: trajectories, conversations, episodes, timelines."""

from __future__ import annotations

import io
import json
import shutil
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
from headrace_coordinator.projections.timeline import Hold, Part, Span, TimelineFile
from headrace_coordinator.projections.trajectories import Call, Message, SettledTrajectory, TrajectoryFile
from headrace_robots.cli.lerobot import EpisodeData, write_data_set
from PIL import Image

from harness.crowd import NOW, Crowd, CrowdServer

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>&amp;\u202e{{7*7}}"
"""What made-up runs and their answers say."""
LONG_RUN = f"{'a-run-of-a-long-name-'}{'x' * 40}-1"
RUNS = [
    ("live-1", "RUNNING"),
    ("queued-1", "QUEUED"),
    ("done-1", "SUCCEEDED"),
    ("failed-1", "FAILED"),
    ("talk-1", "SUCCEEDED"),
    ("agent-1", "SUCCEEDED"),
    ("robot-1", "SUCCEEDED"),
    (LONG_RUN, "CANCELLED"),
]
MANY = 10_000
"""Further runs beside these."""
VIEWS = {
    "runs": ("#/runs", ".runs tbody tr"),
    "run": ("#/runs/live-1", ".chart"),
    "timeline": ("#/runs/done-1/timeline", ".lanes"),
    "trajectories": ("#/runs/done-1/trajectories", ".trajectory"),
    "demonstrations": ("#/runs/robot-1/demonstrations", "tbody tr"),
    "proof": ("#/runs/done-1/proof", "table"),
    "spec": ("#/runs/done-1/spec", "pre"),
    "fleet": ("#/fleet", ".devices li"),
    "compare": ("#/compare?runs=done-1,failed-1", ".chart"),
    "submit": ("#/submit", ".section"),
    "evaluations": ("#/evaluations", "tbody tr"),
    "evaluation": ("#/evaluations/eval-0", ".trajectory"),
    "evaluations compared": ("#/evaluations?compare=eval-0,eval-1", ".trajectory"),
}
"""Address of each view over made-up runs, and what stands there once it is drawn."""


def settled(step: int, prompt: int, sample: int, text: str, better: int = 0) -> SettledTrajectory:
    """A trajectory that says `text`; with `better` that of each third prompt has a reward that is so much higher."""
    return SettledTrajectory(
        step=step, version=step, prompt_ordinal=prompt, sample_index=sample, attempt=1, prompt=f"Q{prompt}: {text}",
        completion=text, reference=text, reward=(prompt + sample) % 4 / 4 + better * (prompt % 3 == 0),
        parts={"exact": 0.5, "rewards/judge.py:score": 0.25, "style/judge.py:score/tone": 0.75},
        finish_reason="EOS", tokens=24,
        versions=[(step - 1, 10), (step, 14)] if step > 1 else [(step, 24)],
        log_probs=[-(n * 7 % 24) / 5 for n in range(24)], text_bytes=places(text, 24), advantage=sample % 4 / 2 - 0.75,
        new_log_probs=[-(n * 7 % 24) / 5 + (n % 3 - 1) / 4 for n in range(24)],
        read=[[f"<|user|>Q{prompt}: {text}<|assistant|>"]],
    )  # fmt: skip


def talked(step: int, prompt: int, sample: int, text: str) -> SettledTrajectory:
    """A conversation in which the policy calls a tool, which says `text`, and answers in a second turn."""
    said = 'Let me see. <tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>'
    call = Call("calculator", '{"expression": "17 * 23"}')
    return SettledTrajectory(
        step=step, version=step, prompt_ordinal=prompt, sample_index=sample, attempt=1, prompt="tools, seed 12",
        completion=f"user: How much is 17 * 23?\nassistant: {said}\ntool: {text}\nassistant: It is 391.",
        reference="391", reward=0.75, parts={"last_number": 1.0}, finish_reason="TERMINATED", tokens=30,
        versions=[(step, 30)], log_probs=[-(n * 7 % 30) / 6 for n in range(30)],
        text_bytes=[*places(said, 24), *places("It is 391.", 6)], advantage=0.5,
        messages=[
            Message("system", "Use the calculator."), Message("user", "How much is 17 * 23?"),
            Message("assistant", said, 24, -0.25, [call]), Message("tool", text),
            Message("assistant", "It is 391.", 6, 1.0),
        ],
    )  # fmt: skip


def long_talk(turns: int) -> SettledTrajectory:
    """A conversation of many turns, whose tool says much, and twice an error."""
    said, messages = "Next.", [Message("user", "Work through the log.")]
    for turn in range(turns):
        told = "\n".join(f"line {line} of answer {turn}" for line in range(60))
        messages += [
            Message("assistant", said, 2, 0.0),
            Message("tool", "error: no such file" if turn in (7, turns - 2) else told),
        ]
    return msgspec.structs.replace(
        talked(1, 0, 0, ""), tokens=2 * turns, versions=[(1, 2 * turns)], log_probs=[-0.5] * (2 * turns),
        text_bytes=places(said, 2) * turns, messages=messages,
    )  # fmt: skip


def branched() -> SettledTrajectory:
    """A session of an agent that went back to its question, and asked a helper of its own: three branches."""
    asked = [Message("system", "You work on files."), Message("user", "Fix the test.")]
    first = [Message("assistant", "Look.", 2, 0.0, branch=0), Message("tool", "error: no such file")]
    again = [Message("assistant", "Read.", 2, 0.5, branch=1), Message("tool", "def test(): ...")]
    other = [Message("user", "Say what fails."), Message("assistant", "The name.", 2, 0.25, branch=2)]
    ends = [Message("assistant", "Done.", 2, 0.25, branch=number) for number in range(2)]
    rendered = "<|system|>You work on files.<|user|>Fix the test.<|assistant|>"
    read = [
        [rendered, "Look.<|end|>", "<|tool|>error: no such file<|assistant|>", "Done.<|end|>"],
        [rendered, "Read.<|end|>", "<|tool|>def test(): ...<|assistant|>", "Done.<|end|>"],
        ["<|user|>Say what fails.<|assistant|>", "The name.<|end|>"],
    ]
    return msgspec.structs.replace(
        talked(1, 0, 0, ""), prompt="Fix the test.", tokens=10, versions=[(1, 10)], log_probs=[-0.5] * 10,
        text_bytes=[n for said in ("Look.", "Done.", "Read.", "Done.", "The name.") for n in places(said, 2)],
        messages=[*asked, *first, ends[0], *asked, *again, ends[1], *other], read=read,
    )  # fmt: skip


def places(text: str, tokens: int) -> list[int]:
    """Bytes of each token: as even as can be, and not at the borders of characters."""
    total = len(text.encode())
    ends = [total * n // tokens for n in range(tokens + 1)]
    return [end - start for start, end in pairwise(ends)]


def write_conversations(directory: Path, text: str) -> None:
    """Conversations of one step, whose tool says `text`."""
    directory.mkdir(parents=True)
    said = [long_talk(300), *(talked(1, 1, sample, text) for sample in range(4))]
    TrajectoryFile(directory, 8, 16 << 20, 100).append(said)


def write_session(directory: Path) -> None:
    """The session of an agent."""
    directory.mkdir(parents=True)
    TrajectoryFile(directory, 8, 16 << 20, 100).append([branched()])


def write_episodes(directory: Path, seen: str) -> None:
    """Episodes of a robot in one step, of a task that is called `seen`: done, not done and lost."""
    directory.mkdir(parents=True)
    told = [
        {"return": 0.96, "success": True, "steps": 12},
        {"return": -1.5, "success": False, "steps": 24},
        {"return": 0.0, "success": False, "steps": 0, "error": "its process was killed by signal 11"},
    ]
    made = [
        msgspec.structs.replace(
            settled(1, 0, sample, seen), completion=json.dumps(episode), reference="", text_bytes=[]
        )
        for sample, episode in enumerate(told)
    ]
    TrajectoryFile(directory, 8, 16 << 20, 100).append(made)


def write_demonstrations(directory: Path) -> None:
    """Two episodes with a camera's pictures, which grow lighter."""
    pictures = []
    for step in range(6):
        png = io.BytesIO()
        Image.new("RGB", (32, 32), (40 * step, 90, 120)).save(png, format="PNG")
        pictures.append(png.getvalue())
    made = [
        EpisodeData(
            HOSTILE, [np.ones(2)] * 6, [np.array([step / 6, number], np.float32) for step in range(6)],
            {"front": pictures}, [0.0] * 5 + [1.0], [False] * 5 + [True], [False] * 5 + [True],
        )
        for number in range(2)
    ]  # fmt: skip
    write_data_set(directory, made, {"front": (32, 32, 3)})


def write_trajectories(directory: Path, steps: int, per_step: int, text: str, better: int = 0) -> None:
    """Files of a run as the coordinator writes them: groups of four."""
    directory.mkdir(parents=True)
    file = TrajectoryFile(directory, per_step, 16 << 20, 100)
    for step in range(1, steps + 1):
        first = (step - 1) * per_step // 4
        file.append([settled(step, first + n // 4, n % 4, text, better) for n in range(per_step)])


def write_timeline(directory: Path, steps: int) -> None:
    """Steps in which two GPUs generate, then learn; the scorers work beside them."""
    directory.mkdir(parents=True, exist_ok=True)
    file, gpus = TimelineFile(directory), ["box/gpu:0", "box/gpu:1"]
    for step in range(1, steps + 1):
        at = NOW + 5 * step
        work = [
            *(Span("generate", [gpu], at + 0.2, at + 2.4 - n / 5) for n, gpu in enumerate(gpus)),
            Span("score", [], at + 1.2, at + 2.5),
            Span("switch", [], at + 2.5, at + 2.8),
            Span("learn", gpus, at + 2.8, at + 4.5),
            Span("sync", gpus, at + 4.5, at + 4.8),
        ]
        holds = [
            *(
                Hold(4 * step + n, f"rollout-{n}", "generate", [gpu], at, at + 2.6, "released")
                for n, gpu in enumerate(gpus)
            ),
            Hold(4 * step + 2, "trainer-0", "learn", gpus, at + 2.6, at + 5, "released"),
        ]
        file.append(Part(kind="step", step=step, start=at, end=at + 5, work=work, holds=holds))


def everything(directory: Path) -> CrowdServer:
    """The app over RUNS, MANY more and two evaluations, with files of each kind below `directory`."""
    runs = directory / "runs"
    (directory / "logs").mkdir()
    lines = [{"level": "info", "message": "ready"}, {"level": "error", "message": "<b>CUDA error</b>"}]
    (directory / "logs" / "rollout-0.log").write_text("\n".join(map(json.dumps, lines)))
    write_trajectories(runs / "done-1", 12, 64, HOSTILE)
    write_timeline(runs / "done-1", 120)
    shutil.copytree(runs / "done-1", runs / LONG_RUN)
    write_conversations(runs / "talk-1", HOSTILE)
    write_session(runs / "agent-1")
    write_episodes(runs / "robot-1", HOSTILE)
    write_trajectories(runs / "many-0", 1563, 64, "The answer is 42.")
    for number in range(2):
        write_trajectories(runs / f"eval-{number}", 1, 48, HOSTILE, better=number)
    many = [(f"many-{number}", "SUCCEEDED") for number in range(MANY)]
    crowd = Crowd([*RUNS, *many], ["eval-0", "eval-1"])
    crowd.data_set = str(directory / "push")
    write_demonstrations(directory / "push")
    return CrowdServer(crowd, runs)
