"""Scorers that hang, exit, raise, print and lie: the answer's fault and the scorer's fault are told apart."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
import pytest
from headrace.reward.v1 import reward_pb2
from headrace_reward.config import PoolSettings
from headrace_reward.pool import OpenFault
from headrace_reward.runs import Item, Run, Status
from headrace_schema.sections.scoring import RewardSection
from headrace_servicekit.rpc.addresses import free_port
from headrace_servicekit.rpc.errors import message_of

OK = reward_pb2.SCORE_STATUS_OK
FAILED = reward_pb2.SCORE_STATUS_ANSWER_FAILED
BROKEN = reward_pb2.SCORE_STATUS_SCORER_BROKEN


def children() -> list[psutil.Process]:
    return [
        each
        for each in psutil.Process().children(recursive=True)
        if "headrace_reward.child" in " ".join(each.cmdline())
    ]


async def open_fault(reward, *scorers, **section) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await reward.open(*scorers, **section)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    message = message_of(raised.value)
    assert "reward.scorers[0].name" in message
    return message


async def test_an_endless_answer_fails_alone(reward, scorer_file):
    name = scorer_file('while completion == "hang": pass\nreturn 1.0')
    await reward.open(name, timeout_s=0.5, failed_reward=-2.0)
    begin = time.monotonic()
    results = await reward.answers(*["a"] * 20, "hang", *["b"] * 20)
    assert time.monotonic() - begin < 10
    hung = results.pop(20)
    assert (hung.status, hung.reward) == (FAILED, -2.0)
    assert "timeout_s = 0.5" in hung.detail
    assert all((each.status, each.reward) == (OK, 1.0) for each in results)


EVIL = "(a+)+b"
PATTERNS = {
    "regex": {"pattern": EVIL, "mode": "fullmatch"},
    "regex by search": {"pattern": EVIL + "$"},
    "capture": {"pattern": "((?:a+)+b)$"},
    "format at the start": {"starts_with": EVIL},
    "format at the end": {"ends_with": EVIL},
    "format anywhere": {"contains": EVIL},
    "alternatives": {"pattern": "(a|a)*b"},
    "back references": {"pattern": r"(a*)*\1b"},
}


@pytest.mark.parametrize("kind", PATTERNS)
async def test_catastrophic_backtracking_is_an_endless_answer(reward, kind):
    """The service answers meanwhile, and the next answer has another process."""
    name = kind.split()[0] if kind.split()[0] in ("capture", "format") else "regex"
    await reward.open({"name": name, "options": PATTERNS[kind]}, timeout_s=0.5)
    judging = asyncio.create_task(reward.answers("a" * 60 + "c", "aab"))
    await asyncio.sleep(
        0.1
    )  # The service is in this loop: in its own process the pattern would hold this, too.
    assert not judging.done()
    hung, fine = await judging
    assert hung.status == FAILED and "reward.timeout_s = 0.5" in hung.detail
    assert fine.status == OK


async def test_a_pattern_that_takes_too_long_to_read_is_refused_by_its_scorer(reward):
    """Each class of characters without regard to case is a walk through all of Unicode."""
    long = {"pattern": "[\\x00-\\U0010ffff]" * 2000, "ignore_case": True}
    said = await open_fault(reward, {"name": "regex", "options": long}, load_timeout_s=1.0)
    assert "1 s without an end (reward.load_timeout_s)" in said


async def test_the_hung_child_is_gone_with_what_it_started(reward, scorer_file, shared):
    body = f"""
import subprocess, time
if completion == "hang":
    with open("{shared}/pid", "w") as file:
        file.write(str(subprocess.Popen(["sleep", "60"]).pid))
    time.sleep(60)
return 1.0"""
    await reward.open(scorer_file(body), timeout_s=0.5)
    pid = shared / "pid"
    while not (pid.exists() and pid.read_text()):  # on a busy machine it may be killed before it starts one
        await reward.answers("hang", "a")
    started = int(pid.read_text())
    async with asyncio.timeout(10):
        # Where nobody reaps orphans, a killed one stays as a zombie.
        while psutil.pid_exists(started) and psutil.Process(started).status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (6, 12),
    reason="Landlock scopes signals from Linux 6.12 on",
)
async def test_a_scorer_cannot_signal_the_service(reward, scorer_file, shared):
    """It is refused, the service lives on, and what the scorer itself starts can be signalled."""
    body = f"""
import os, subprocess
refused = 0
os.chdir("{shared}")
try:
    os.kill(os.getppid(), 9)
except PermissionError:
    refused = 1
child = subprocess.Popen(["sleep", "60"])
child.kill()
os.makedirs("from", exist_ok=True)
open("from/file", "w").close()
os.rename("from/file", "file")
return refused + (child.wait() == -9) * 10.0"""
    await reward.open(scorer_file(body))
    assert [each.reward for each in await reward.answers("a", "b")] == [11.0, 11.0]


@pytest.mark.parametrize("end", ["pass", "os._exit(3)"])
async def test_a_daemon_that_a_scorer_starts_ends_with_the_run(reward, scorer_file, shared, end):
    """It has its own session and its parent has ended; with `os._exit`, the scoring process has ended before, too."""
    body = f"""
import os, subprocess, sys
starts = "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid)"
with open("{shared}/pids", "a") as file:
    subprocess.run([sys.executable, "-c", starts], stdout=file, stdin=0)
if completion: {end}
return 1.0"""
    await reward.open(scorer_file(body))
    await reward.answers("a")
    await reward.close()
    daemons = [int(pid) for pid in (shared / "pids").read_text().split()]
    assert daemons
    for _ in range(100):
        left = [pid for pid in daemons if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        if not left:
            break
        await asyncio.sleep(0.05)
    assert not left


@pytest.mark.parametrize("way", ["os._exit(3)", "sys.exit(3)", "os.kill(os.getpid(), 9)"])
async def test_an_answer_that_ends_the_process_fails_alone(reward, scorer_file, way):
    name = scorer_file(f'import os, sys\nif completion == "die": {way}\nreturn 1.0')
    await reward.open(name)
    results = await reward.answers("a", "die", "b")
    assert [each.status for each in results] == [OK, FAILED, OK]


async def test_a_killed_child_costs_no_answer(reward, scorer_file):
    name = scorer_file("import time; time.sleep(0.02); return 1.0")
    await reward.open(name)
    scoring = asyncio.create_task(reward.answers(*["a"] * 100))
    await asyncio.sleep(0.5)
    for child in children():
        child.send_signal(signal.SIGKILL)
    assert [each.status for each in await scoring] == [OK] * 100


async def test_raising_for_some_answers_is_their_fault(reward, scorer_file):
    await reward.open(scorer_file("return float(completion)"), failed_reward=-1.0)
    good, bad = await reward.answers("0.25", "word", reference="1")
    assert (good.status, good.reward) == (OK, 0.25)
    assert (bad.status, bad.reward) == (FAILED, -1.0)
    assert "ValueError" in bad.detail and "mine.py:2" in bad.detail


async def test_raising_for_any_answer_is_the_scorers_fault(reward, scorer_file):
    await reward.open(scorer_file('return metadata["absent"][completion]'))
    (broken,) = await reward.answers("3", reference="1")
    assert broken.status == BROKEN and "KeyError" in broken.detail


async def test_a_broken_result_is_not_recorded(reward, scorer_file, tmp_path):
    name = scorer_file(f'return float(open("{tmp_path}/value").read())')
    await reward.open(name)
    item = reward.item("a")
    assert [each.status for each in await reward.score(item)] == [BROKEN]
    (tmp_path / "value").write_text("0.5")
    assert [each.reward for each in await reward.score(item)] == [0.5]


@pytest.mark.parametrize("value", ['float("nan")', 'float("inf")', '{"a": 1.0, "b": float("nan")}'])
async def test_values_that_are_not_finite_break_the_scorer(reward, scorer_file, value):
    await reward.open(scorer_file(f"return {value} if prompt else 0.0"))
    (broken,) = await reward.answers("a", prompt="p")
    assert broken.status == BROKEN and "not a finite number" in broken.detail


async def test_dicts_are_summed_and_shown(reward, scorer_file):
    await reward.open((scorer_file('return {"truth": 1, "style": 0.5}'), 2.0))
    (result,) = await reward.answers("a")
    assert result.reward == 3.0
    assert dict(result.parts) == {
        "mine.py:score": 1.5,
        "mine.py:score/truth": 1.0,
        "mine.py:score/style": 0.5,
    }


async def test_printing_does_not_disturb(reward, scorer_file):
    body = 'import os, sys\nprint("x" * 5000); os.write(1, b"junk"); sys.stdin.read()\nreturn 1.0'
    await reward.open(scorer_file(body))
    assert [each.reward for each in await reward.answers("a", "b")] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("#file\ndef score(a, b", "SyntaxError"),
        (
            "#file\nimport no_such_module\ndef score(prompt, completion, reference, metadata): return 1.0",
            "no_such_module",
        ),
        ("#file\nraise RuntimeError('at import')", "at import"),
        ("#file\nimport os; os._exit(4)", "exit code 4"),
        ("#file\ndef scores(p, c, r, m): return 1.0", "there is no function 'score'"),
        ("#file\ndef score(p, c): return 1.0", "its parameter 'p' is none of prompt, completion"),
        ("return undefined_name", "NameError"),
        ('return "0.5"', "returned str, not a number"),
        ("return [1.0]", "returned list, not a number"),
        ("#file\ndef score(*answer): return 1.0", "it takes *args, but arguments are given by name"),
        ("#file\ndef score(completion, /): return 1.0", "'completion' can only be given by place"),
        ("#file\ndef score(): return 1.0", "it takes none of prompt"),
        ("#file\ndef score(completions, trainer_state): return [1.0]", "which only TRL's trainer has"),
        ("#file\ndef score(completions): return 1.0", "returned float for 1 answers"),
        ("while True: pass", "was probed with a blank answer"),
        ("import os; os._exit(5)", "exit code 5"),
    ],
)
async def test_scorers_that_cannot_work_are_refused_at_opening(reward, scorer_file, source, expected):
    timeout_s = 1.0 if source.startswith("while") else 20.0
    assert expected in await open_fault(reward, scorer_file(source), timeout_s=timeout_s)
    assert children() == []


async def test_code_that_changes_during_a_run_is_not_taken_up(scorer_file, tmp_path):
    name = scorer_file('while completion == "hang": pass\nreturn 1.0')
    section = RewardSection.model_validate({"scorers": [{"name": name}], "timeout_s": 0.3})
    run = Run(section, tmp_path, PoolSettings(children=1))
    await run.open()
    scorer_file("return 5.0")
    hung = await run.score(Item(0, 0, 1, False, False, answer("hang")))
    after = await run.score(Item(1, 0, 1, False, False, answer("a")))
    await run.close()
    assert hung.status is Status.ANSWER_FAILED
    assert after.status is Status.SCORER_BROKEN and "has changed since the run was opened" in after.detail


async def test_the_debug_pool_judges_in_this_process(scorer_file, tmp_path):
    name = scorer_file('import os; return float(os.getpid()) if completion else float("nan")')
    run = Run(
        RewardSection.model_validate({"scorers": [{"name": name}]}), tmp_path, PoolSettings(), inline=True
    )
    await run.open()
    verdict = await run.score(Item(0, 0, 1, False, False, answer("a")))
    assert (verdict.status, verdict.reward) == (Status.OK, os.getpid())
    wrong = RewardSection.model_validate({"scorers": [{"name": "exat"}]})
    with pytest.raises(OpenFault, match="did you mean 'exact'"):
        await Run(wrong, tmp_path, PoolSettings(), inline=True).open()


def answer(completion: str) -> dict:
    return {"prompt": "", "completion": completion, "reference": "", "metadata": {}, "token_count": 1}


async def test_neighbours_of_the_file_can_be_imported(reward, scorer_file, tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("VALUE = 0.75\n")
    name = scorer_file("import helper_of_mine; return helper_of_mine.VALUE")
    await reward.open(str(tmp_path / name))
    assert [each.reward for each in await reward.answers("a")] == [0.75]


@pytest.mark.parametrize("late", [False, True])
async def test_two_folders_may_have_helpers_of_one_name(reward, tmp_path, late):
    """Each scorer gets its own `helper`, also where it imports it only as it scores, and where the files are alike."""
    scorers = []
    for folder, value in (("a", 1.0), ("b", 20.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper.py").write_text(f"VALUE = {value}\n")
        inside, outside = ("    import helper\n", "") if late else ("", "import helper\n")
        head = "def score(prompt, completion, reference, metadata):\n"
        (tmp_path / folder / "mine.py").write_text(f"{outside}{head}{inside}    return helper.VALUE\n")
        scorers.append(f"{folder}/mine.py:score")
    await reward.open(*scorers)
    answers = await reward.answers("x", "y", "z")
    assert [dict(each.parts) for each in answers] == [{scorers[0]: 1.0, scorers[1]: 20.0}] * 3


async def test_a_scorer_sees_no_secrets(reward, scorer_file, monkeypatch):
    monkeypatch.setenv("HEADRACE_TOKEN_FILE", "/secret")
    await reward.open(scorer_file('import os; return float(any("HEADRACE" in k for k in os.environ))'))
    assert [each.reward for each in await reward.answers("a")] == [0.0]


async def test_closing_a_run_ends_its_children(reward, scorer_file):
    await reward.open(scorer_file("import time\nif completion: time.sleep(60)\nreturn 1.0"), timeout_s=60)
    waiting = asyncio.create_task(reward.answers("1", "2", "3"))
    await asyncio.sleep(0.5)
    assert children()
    await reward.close()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await waiting
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert children() == []


async def test_nothing_is_left_when_the_service_is_killed(tmp_path):
    """The process itself: `python -m headrace_reward`, a child deep in an answer, SIGKILL."""
    from headrace.common.v1 import common_pb2
    from headrace.reward.v1 import reward_pb2_grpc
    from headrace_servicekit.rpc.client import dial

    (tmp_path / "slow.py").write_text(
        "import time\ndef score(completion):\n    completion and time.sleep(60)\n    return 1.0\n"
    )
    with _service(tmp_path) as (process, address):
        channel = dial(address, token=None)
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        header = common_pb2.CommandHeader(run="runs/a", coordinator_epoch=1)
        config = '{"scorers": [{"name": "slow.py:score"}], "timeout_s": 60}'
        request = reward_pb2.OpenRunRequest(header=header, config_json=config)
        await stub.OpenRun(request, timeout=60, wait_for_ready=True)
        call = stub.Score()
        await call.write(reward_pb2.ScoreRequest(header=header, items=[reward_pb2.ScoreItem(completion="a")]))
        await asyncio.sleep(0.5)
        found = psutil.Process(process.pid).children(recursive=True)
        assert found
        process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, found, timeout=20)
        assert alive == []
        await channel.close()


class _service:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self):
        address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "headrace_reward", "--listen", address]
        self._process = subprocess.Popen(
            [*command, "--shm-dir", str(self._directory / "shm")],
            cwd=self._directory,
            env={**os.environ, "HEADRACE_REWARD_CHILDREN": "1"},
            stderr=subprocess.DEVNULL,
        )
        return self._process, address

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait(10)


async def test_a_slow_import_has_the_limit_of_the_spec(reward, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\ntime.sleep(30)\ndef score(prompt, completion, reference, metadata): return 1.0\n"
    )
    said = await open_fault(reward, f"{tmp_path}/slow.py:score", load_timeout_s=1.0)
    assert "was loaded for 1 s without an end (reward.load_timeout_s)" in said


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('raise ValueError("a \\ud800 half")', "ValueError: a ? half"),
        ('return {"score": 1.0, "n\\ud800": 2.0}', ""),
        ('raise ValueError("cause") from KeyError("\\udfff")', "KeyError: '\\udfff'"),
    ],
)
async def test_half_of_a_surrogate_pair_costs_no_stream(reward, scorer_file, body, words):
    """No message on the wire takes it."""
    await reward.open(scorer_file(body))
    (first,) = await reward.answers("a")
    (second,) = await reward.answers("b")
    assert words in first.detail and first.status == second.status
    assert all(name.isascii() or "�" in name for name in first.parts), first.parts
