"""Failpoints: the scripted fault happens at the named place, at the n-th pass."""

import os
import signal
import subprocess
import sys
import time

import pytest
from headrace_servicekit import failpoints
from headrace_servicekit.failpoints import arm, failpoint, failpoint_sync
from headrace_servicekit.rpc.errors import ServiceError

SCRIPT = """
from headrace_servicekit.failpoints import failpoint_sync
for number in range(1, 5):
    print(number, flush=True)
    failpoint_sync("place")
"""


@pytest.fixture(autouse=True)
def disarmed():
    yield
    arm("")


def run_with(rules):
    environment = {**os.environ, failpoints.VARIABLE: rules}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=30
    )


def test_kill_at_the_third_pass():
    ended = run_with("other=error;place=kill@3")
    assert ended.returncode == -signal.SIGKILL and ended.stdout.split() == ["1", "2", "3"]


def test_without_rules_nothing_happens():
    assert run_with("").stdout.split() == ["1", "2", "3", "4"]


def test_a_malformed_rule_is_named():
    ended = run_with("place=explode")
    assert ended.returncode == 1 and "HEADRACE_FAILPOINTS: 'place=explode' is no rule" in ended.stderr


async def test_error_at_one_pass_and_at_every_pass():
    arm("a=error@2; b=error")
    await failpoint("a")
    with pytest.raises(ServiceError, match="failpoint a"):
        await failpoint("a")
    await failpoint("a")
    for _ in range(2):
        with pytest.raises(ServiceError, match="FAILPOINT"):
            failpoint_sync("b")


async def test_delay():
    arm("slow=delay:0.2; never=delay:600@2")
    began = time.monotonic()
    await failpoint("slow")
    assert time.monotonic() - began >= 0.2
    await failpoint("never")  # not its second pass


async def test_a_rule_may_act_from_a_pass_on():
    arm("late=error@3+")
    for _ in range(2):
        await failpoint("late")
    for _ in range(3):
        with pytest.raises(ServiceError):
            await failpoint("late")
