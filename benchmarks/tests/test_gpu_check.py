"""The minutes on GPUs are rehearsed on the CPU, and whatever an entry does, the next one runs and each has its line."""

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import _gpu_bundle
import _gpu_checks
import _gpu_plan
import _gpu_runs
import gpu_check
import pytest
import torch
from _gpu_judging import LEAST_SHARE, asleep_wrong, largest_wrong, peak_tflops, same_norms_wrong
from _gpu_plan import CHECKS, GRACE_S, LENT_S, Check, whole_s, why_not
from gpu_check import every, install, one, watched

from ci.engines.resolution import Package

SCRIPT = Path(gpu_check.__file__)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_3():
    ended = run()
    assert ended.returncode == 3 and "no GPU" in ended.stderr and not ended.stdout


@pytest.mark.timeout(240)
def test_quick_checks_run_on_the_cpu_and_each_has_a_line():
    """Those without a fleet: what one with a fleet does is `_run_at_size.py`, which has tests of its own."""
    ended = run("--device", "cpu", "--only", "basics", "weight_sync")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    basics, sync, summary = map(json.loads, ended.stdout.splitlines())
    assert (basics["check"], basics["status"]) == ("basics", "passed") and basics["figures"]["ranks"]
    assert sync["status"] == "passed" and sync["figures"]["digest_gb_per_s"] > 0
    assert summary["figures"]["passed"] == 2 and not summary["figures"]["failed"]


PRINTS = "import json; print('a word'); print(json.dumps({'status': 'passed', 'figures': {'x': 1}}))"


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        (PRINTS, "passed", None),
        ("raise RuntimeError('no room')", "failed", "RuntimeError: no room"),
        ("import sys; sys.exit(4)", "failed", "it ended with status 4"),
        ("import os; os.kill(os.getpid(), 9)", "died", "signal 9 ended it"),
        ("import time; time.sleep(60)", "late", "it did not end within 1 s"),
    ],
)
def test_a_check_that_raises_dies_or_hangs_is_one_finding(code, status, reason):
    found = watched([sys.executable, "-c", code], 1.0 if status == "late" else 30.0)
    assert (found["status"], found.get("reason")) == (status, reason)


def test_what_a_late_check_has_started_is_ended_with_it(tmp_path, monkeypatch):
    """Its child would keep the GPU from the next check: SIGTERM alone does not reach it."""
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.5)
    file = tmp_path / "child"
    code = (
        "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(file)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid)); time.sleep(60)"
    )
    assert watched([sys.executable, "-c", code], 3.0)["status"] == "late"
    child, deadline = Path("/proc") / file.read_text(), time.monotonic() + 10
    while child.exists() and "(sleep) Z" not in (child / "stat").read_text():
        assert time.monotonic() < deadline, "its child still runs"
        time.sleep(0.05)


def has_all(module):
    return ""


def has_none(module):
    return f"{module} is not installed"


def test_every_check_is_run_whatever_the_ones_before_did(monkeypatch, capsys):
    made = iter(
        [
            {"status": "failed", "reason": "x"},
            {"status": "late", "reason": "y"},
            {"status": "passed", "figures": {}},
        ]
    )
    monkeypatch.setattr(gpu_check, "watched", lambda command, deadline_s: next(made))
    checks = [Check(name, 10, f"that {name} holds") for name in "abc"]
    checks += [Check("d", 10, "that d holds", needs="no_such_engine")]
    assert every(checks, 0, "cpu", None) == 1
    *lines, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["status"] for line in lines] == ["failed", "late", "passed", "skipped"]
    assert [line["proves"] for line in lines] == [f"that {name} holds" for name in "abcd"]
    assert lines[-1]["reason"].startswith("no_such_engine is not installed")
    figures = summary["figures"]
    assert [figures[name] for name in ("passed", "failed", "late", "skipped")] == [1, 1, 1, 1]
    assert (
        figures["torch"] == torch.__version__ and figures["commit"]
    )  # all that the reader of a result needs


def test_what_cannot_run_says_why():
    assert why_not(Check("a", 10, "", gpus=2), 1, 99.0, has_all) == "it needs 2 GPUs and there is 1"
    assert why_not(Check("a", 10, "", gpus=2), 2, 99.0, has_all) == ""
    assert why_not(Check("a", 10, "", gpus=2), 0, 99.0, has_all) == ""
    assert why_not(Check("a", 10, "", needs="vllm"), 1, 99.0, has_none) == "vllm is not installed"
    words = why_not(Check("a", 10, ""), 1, 15.0, has_all)
    assert words.startswith("it may take 20 s and 15 s are left; raise --limit")


ORDER = (
    "basics largest deterministic built_in weight_sync collocated asleep broadcast killed_rank lora sglang layouts "
    "out_of_memory experts megatron two_hosts simulated"
)


def test_the_entries_come_in_the_order_of_what_is_worth_most():
    assert [check.name for check in CHECKS] == ORDER.split()
    assert all(check.proves for check in CHECKS)


@pytest.mark.parametrize(
    ("gpus", "lacks"), [(1, has_none), (1, has_all), (2, has_all), (8, has_all), (0, has_none)]
)
def test_deadlines_add_up(gpus, lacks, monkeypatch, capsys):
    """Though every entry is late, all of them end within what was said, each with its whole time."""
    clock, ran = [1000.0], []

    def late(command, deadline_s):
        ran.append(command[command.index("--one") + 1])
        clock[0] += deadline_s + GRACE_S
        return {"status": "late", "reason": "late"}

    monkeypatch.setattr(gpu_check, "watched", late)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(gpu_check, "machine", lambda gpus: {})
    monkeypatch.setattr("_gpu_bench.missing", lacks)
    every(CHECKS, gpus, "gpu" if gpus else "cpu", None)
    runnable = [check.name for check in CHECKS if not why_not(check, gpus, 1e9, lacks)]
    assert ran == runnable and clock[0] - 1000.0 == whole_s(CHECKS, gpus, lacks)
    for limit in (LENT_S, 200.0):
        clock[0], began = 0.0, len(ran)
        every(CHECKS, gpus, "gpu" if gpus else "cpu", limit)
        assert clock[0] <= limit and len(ran) > began
    capsys.readouterr()


def test_one_lent_gpu_without_engines_shows_all_that_it_can_within_its_ten_minutes():
    assert whole_s(CHECKS, 1, has_none) <= LENT_S < 600
    alone = {check.name for check in CHECKS if not why_not(check, 1, 1e9, has_none)}
    assert alone >= {"basics", "largest", "deterministic", "built_in", "weight_sync", "lora", "out_of_memory"}


def test_the_plan_is_told_without_a_gpu():
    told = run("--plan", "--gpus", "8", "--limit", "300")
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert told.returncode == 0 and [line["check"] for line in lines] == ORDER.split()
    assert sum(line["seconds"] for line in lines if "skipped" not in line) <= 300
    assert any("are left; raise --limit" in line.get("skipped", "") for line in lines)


def figures(ratio, planned=50e9):
    return {"peak_device_bytes": ratio * planned, "planned_device_bytes": planned}


def test_the_largest_model_is_judged_by_its_plan_and_by_the_gpus_peak():
    assert largest_wrong([figures(1.0), figures(0.91)], 0.36 * 2 * 989, 989) == []
    for ratio, words in ((1.2, "1.20 times the memory"), (0.85, "0.85 times"), (0.0, "0.00 times")):
        (wrong,) = largest_wrong([figures(1.0), figures(ratio)], 2 * 989, 989)
        assert wrong.startswith("rank 1 took") and words in wrong
    (slow,) = largest_wrong([figures(1.0)], (LEAST_SHARE - 0.01) * 989, 989)
    assert "0.34 of the peak of 1 GPUs (989 each), 0.35 are wanted" in slow


def test_a_gpus_peak_is_its_data_sheets_or_what_a_product_reached():
    assert peak_tflops("NVIDIA H100 80GB HBM3", 700) == peak_tflops("NVIDIA H200", 700) == 989
    assert (peak_tflops("NVIDIA H20", 100), peak_tflops("NVIDIA H100 PCIe", 1)) == (148, 756)
    assert (peak_tflops("NVIDIA L40S", 1), peak_tflops("NVIDIA L40", 1), peak_tflops("NVIDIA L4", 1)) == (
        362,
        181,
        121,
    )
    assert peak_tflops("A GPU of next year", 1234.5) == 1234.5


def test_two_ways_to_the_same_gradient_are_compared_to_the_bit_or_to_their_rounding():
    assert same_norms_wrong("twice", [1.0, 2.0], [1.0, 2.0]) == []
    assert same_norms_wrong("twice", [1.0], [1.0 + 1e-12]) and same_norms_wrong("twice", [], [])
    assert same_norms_wrong("twice", [0.0], [0.0]) and same_norms_wrong(
        "twice", [float("nan")], [float("nan")]
    )
    assert same_norms_wrong("hsdp", [1.0], [1.0005], tolerance=1e-3) == []
    assert "hsdp: gradient norms [1.0] and [1.1] differ" in same_norms_wrong(
        "hsdp", [1.0], [1.1], tolerance=1e-3
    )


def test_an_engine_that_is_started_again_or_keeps_too_much_asleep_fails():
    assert asleep_wrong({"engine_starts": 1.0, "engine_asleep_bytes": 1e9}, 2e9) == []
    again, kept = asleep_wrong({"engine_starts": 4.0, "engine_asleep_bytes": 3e9}, 2e9)
    assert "started 4 times" in again and "2861 MiB" in kept
    assert asleep_wrong({}, 2e9) == ["the engine was started 0 times in one run"]


def test_a_finding_with_problems_fails(monkeypatch, tmp_path):
    code = (
        "import sys, pathlib, _gpu_checks, gpu_check; "
        "_gpu_checks.bad = lambda bench: _gpu_checks.Finding({'x': 1}, ('too much', 'too late')); "
        "print('noise'); sys.exit(gpu_check.one('bad', 0, pathlib.Path('.')))"
    )
    found = watched(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); {code}"], 60.0
    )
    assert found == {"status": "failed", "figures": {"x": 1}, "reason": "too much; too late"}
    assert {check.name for check in _gpu_plan.CHECKS} <= vars(_gpu_checks).keys() | vars(
        _gpu_runs
    ).keys() and one


def write_wheel(folder, name, *, size=0):
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "SAYS = 'from a folder'\n")
        wheel.writestr(
            f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", tags)
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
        if size:
            wheel.writestr(f"{name}.bin", b"\0" * size)


def test_carried_wheels_are_taken_without_an_index_beside_the_packages_of_this_python(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "CARRIED", tmp_path / "site")
    with pytest.raises(SystemExit, match="holds no wheel: make gpu-check-bundle"):
        install(tmp_path)
    write_wheel(tmp_path, "carried")
    install(tmp_path)
    code = "import carried, torch; print(carried.SAYS)"  # the lent machine's torch is its own
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=gpu_check.with_sources()
    )
    assert ended.stdout == "from a folder\n"


def test_a_bundle_holds_what_torch_does_not_bring_and_the_machine_has_not():
    asked = _gpu_bundle.requirements()
    assert any(each.startswith("transformers>=5.20") for each in asked) and not any(
        "headrace" in each for each in asked
    )
    wants = {"transformers": ("numpy>=1.17", "tokenizers<=0.24,>=0.23"), "torch": ("sympy>=1.13",)}
    names = ("torch", "sympy", "jinja2", "hf-xet", "numpy", "grpcio", "pyyaml", "tokenizers", "transformers")
    resolved = [Package(name, "9.0", wants.get(name, ())) for name in names]
    there = _gpu_bundle.read_freeze(
        "# pip freeze\nNumPy==2.5.2\ngrpcio==1.60.0\ntokenizers==0.22.1\ntransformers==5.17.0\nodd @ file:///x\n"
    )
    carried = _gpu_bundle.wanted(resolved, asked, there)
    assert carried == ["grpcio==9.0", "pyyaml==9.0", "tokenizers==9.0", "transformers==9.0"]
    options = _gpu_bundle.for_python("3.12")
    assert options[:2] == ["--python-version", "3.12"] and "manylinux_2_28_x86_64" in options


def test_a_bundle_is_at_most_what_may_travel(monkeypatch, tmp_path):
    write_wheel(tmp_path, "small")
    write_wheel(tmp_path, "large", size=3 << 20)
    told = _gpu_bundle.manifest(tmp_path)
    assert told["bytes"] == sum(told["wheels"].values()) and len(told["wheels"]) == 2
    monkeypatch.setattr(_gpu_bundle, "MOST_BYTES", 1 << 20)
    with pytest.raises(_gpu_bundle.TooLarge, match=r"3 MiB and 1 are the most: large-1\.0.*THERE=FILE"):
        _gpu_bundle.manifest(tmp_path)


@pytest.mark.nightly  # every entry with a CPU form; `test_quick_checks_run_on_the_cpu…` is the quick twin
@pytest.mark.timeout(1800)
def test_every_entry_runs_its_cpu_form():
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines()[:-1]]
    assert ended.returncode == 0, ended.stdout + ended.stderr
    alone = {check.name for check in CHECKS if not check.needs}
    assert {line["check"] for line in lines if line["status"] == "passed"} >= alone - {
        *("broadcast", "two_hosts", "out_of_memory")  # NCCL and CUDA's allocator have no CPU form
    }
