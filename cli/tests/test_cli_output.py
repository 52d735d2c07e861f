"""What the command line prints where: versions, errors for programs, narrow terminals, logs."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from headrace.client import Certificate, Event, Instance, Leases, Step, Trajectory
from headrace.client.errors import HeadraceError, Problem
from headrace_cli.commands.options import complete_key, complete_run
from headrace_cli.errors import refused
from headrace_cli.output import console, error_console, styled
from headrace_cli.show.fleet import devices_table, instances_table
from headrace_cli.show.reporters import event_line, figures
from headrace_cli.show.runs import (
    STAGES,
    certificates_table,
    columns_table,
    measured,
    runs_list,
    sentence,
    step_line,
    steps_table,
)
from headrace_cli.show.trajectories import trajectories_list
from rich.console import Console

RUN_ID = "a-run-with-a-name-of-forty-characters-x-1a2b3c"


def drawn(table, width):
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(table)
    return file.getvalue().splitlines()


def test_version(headrace):
    result = headrace("--version")
    assert result.returncode == 0 and re.fullmatch(r"headrace \d+\.\d+\.\d+\n", result.stdout)


def test_completion_is_offered(headrace):
    assert "--install-completion" in headrace("--help").stdout


def test_keys_of_specs_are_completed():
    assert ("optimizer.", "How a step moves the weights.") in complete_key("opt")
    found = dict(complete_key("trainer.lora.r"))
    assert "rank" in found["trainer.lora.rank="] and all(word.startswith("trainer.lora.r") for word in found)
    assert complete_key("no.such") == [] and len(complete_key("")) > 20


def test_run_ids_are_completed(coordinator):
    runs = [{"id": f"{name}-1a2b3c", "state": "RUNNING"} for name in ("sums", "sorts", "other")]
    coordinator.routes["GET /v1/runs"] = (200, {"runs": runs})
    asked = SimpleNamespace(params={"url": coordinator.url})
    assert complete_run(asked, "s") == [("sums-1a2b3c", "RUNNING"), ("sorts-1a2b3c", "RUNNING")]
    coordinator.routes["GET /v1/runs"] = (500, {"message": "not now"})
    assert complete_run(asked, "s") == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "get", "--json"], "Missing argument"),
        (["run", "list", "--no-such-option", "--json"], "No such option"),
        (["up", "--rollout", "-1", "--json"], "--rollout"),
        (["run", "get", "r-9", "--json"], "no /v1/runs/r-9"),
    ],
)
def test_each_error_is_json_on_standard_output_when_asked(headrace, arguments, words):
    result = headrace(*arguments)
    (line,) = result.stdout.splitlines()
    assert result.returncode == 2 and words in json.loads(line)["error"]["message"]


@pytest.mark.parametrize("make", [console, error_console])
def test_no_color_leaves_no_escape(make, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    made = make.__wrapped__()
    with made.capture() as said:
        made.print(styled(("x", "bold"), " ", ("y", "dim red")))
    assert said.get() == "x y\n"


def instance(name):
    fields = {"state": "READY", "address": "127.0.0.1:45678", "devices": ["h/cpu:0"], "kind": name[:-2]}
    return Instance.from_json({"name": name, "resident_memory_bytes": 2**30, "busy_cores": 1.5, **fields})


def test_a_fleet_fits_60_columns():
    lines = drawn(instances_table([instance("rollout-0"), instance("simulator-0")], "http://h:1", 60), 60)
    assert sum("READY" in line for line in lines) == 3 and len(lines) == 7, lines
    device = {"name": "a-host-with-a-long-name/cpu:0", "state": "LEASED", "holder": "trainer-0", "reason": ""}
    lines = drawn(devices_table(Leases.from_json({"leases": [], "devices": [device]}), 60), 60)
    assert any("cpu:0" in line and "LEASED" in line and "trainer-0" in line for line in lines), lines


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_runs_id_is_in_one_piece(scripted_run, width):
    from headrace.client import Run

    run = scripted_run()
    run.submitted_at, run.spec = time.time(), {"name": "x"}
    view = run.view() | {"id": RUN_ID, "waiting_for": ["a lease on " + "host/cpu:0, " * 20]}
    loads = "trainer-0 loads model and optimizer, for 4 s"
    assert (
        sentence(Run.from_json(run.view() | {"state": "PLANNING", "waiting_for": [], "doing": [loads]}))
        == loads
    )
    assert any(RUN_ID in line for line in drawn(runs_list([Run.from_json(view)], width), width))


def test_runs_are_listed_with_keys_of_their_specs_and_figures(scripted_run):
    from headrace.client import Run

    run = scripted_run()
    run.submitted_at, run.spec = time.time(), {"name": "x", "optimizer": {"lr": 3e-5, "betas": [0.9, 0.95]}}
    found = Run.from_json(run.view())
    lines = drawn(columns_table([found], ["optimizer.lr", "optimizer.betas", "figures.none"]), 160)
    (line,) = [line for line in lines if "0/" in line or "/100" in line]
    assert "3e-05" in line and "[0.9, 0.95]" in line and line.rstrip().endswith("–")


def trajectory(**fields):
    answer = {
        "prompt": "a question " * 20,
        "completion": "an\nanswer " * 30,
        "reference": "42",
        "reward": 0.5,
    }
    return Trajectory.from_json(answer | {"step": 3, "tokens": 12, "finish_reason": "EOS"} | fields)


def test_trajectories_fit_80_columns_and_episodes_are_told_in_words():
    episode = json.dumps({"return": 7.25, "success": True, "steps": 31})
    lost = json.dumps({"return": 0.0, "success": False, "steps": 0, "error": "the simulator ended"})
    found = [trajectory(), *(trajectory(prompt="reach", reference="", completion=c) for c in (episode, lost))]
    lines = drawn(trajectories_list(found, 80), 80)
    assert len(lines) == 6 and max(map(len, lines)) <= 80
    assert (
        lines[0].startswith("step 3, prompt 0, sample 0: reward 0.500, 12 tokens")
        and "→ an\\nanswer" in lines[1]
    )
    assert "12 actions" in lines[2] and "episode succeeded after 31 steps, return 7.25" in lines[3]
    assert "episode lost: the simulator ended" in lines[5]
    wide = " ".join(drawn(trajectories_list(found, 160), 160))
    assert "prompt " in wide and "episode succeeded" in wide


def test_a_conversation_fits_80_columns_and_what_tools_say_steers_no_terminal():
    given = [
        {"role": "user", "content": "How much is 17 * 23?"},
        {"role": "assistant", "content": "Let me see. " * 9, "tokens": 12, "reward": -0.25,
         "calls": [{"name": "calculator", "arguments_json": '{"expression": "17 * 23"}'}]},
        {"role": "tool", "content": "391\x1b[31m\u202e" + "x" * 900},
        {"role": "assistant", "content": "391", "tokens": 4, "reward": 1.0},
    ]  # fmt: skip
    figures = {"turns": 2, "output_tokens": 1234.0}
    talk = trajectory(messages=given, versions=[(7, 16)], finish_reason="TERMINATED", figures=figures)
    lines = drawn(trajectories_list([talk], 80), 80)
    assert lines.pop() == "  its agent: turns 2, output_tokens 1234"
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80 and "TERMINATED, version 7" in lines[0]
    assert "[12 tokens with loss, reward -0.25]" in text and "[4 tokens with loss, reward 1]" in text
    assert 'calls calculator {"expression": "17 * 23"}' in text
    assert "\x1b" not in text and "\\x1b[31m\\u202e" in text and "… 909 characters" in text
    assert [line.split()[0] for line in lines[1:] if line[2:3].strip()] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    whole = drawn(trajectories_list([talk], 80, whole=True), 80)
    assert "\x1b" not in "".join(whole) and sum(line.count("x") for line in whole) >= 900, "uncut"
    assert drawn(trajectories_list([talk], 160), 160)[0] == lines[0], "a table has no room for what was said"
    (hidden,) = [line for line in drawn(trajectories_list([trajectory(messages=given[-1:], masked=True)], 80), 80)
                 if "4 tokens" in line]  # fmt: skip
    assert "no loss" in hidden


def test_the_whole_of_a_trajectory_has_what_the_model_read_uncut():
    rendered = "<|system|>Be brief.\n<|user|>" + "1+" * 300 + "1?<|assistant|>"
    found = trajectory(prompt="1+" * 300 + "1?", completion="301", read=[[rendered]])
    text = "".join(drawn(trajectories_list([found], 80, whole=True), 80))
    assert "<|system|>Be brief." in text and text.count("1+") == 300 and "-- answer301" in text
    short = "\n".join(drawn(trajectories_list([found], 80), 80))
    assert "1+1+" in short and "…" in short and "1? → 301" in short, "cut in its middle"


def test_versions_have_their_numbers_as_on_the_page_and_attempts_are_counted_from_1():
    leapt = 1 << 20  # a restarted coordinator's counters

    def certificate(step, number, live):
        version = {"number": number, "parent": 0, "ordinal": step, "digest": "d"}
        return Certificate.from_json({"step": step, "version": version, "attempt": number, "live": live})

    made = [certificate(1, 1, True), certificate(2, 2, False), certificate(2, leapt + 3, True)]
    rows = [
        line.split()[:4] for line in drawn(certificates_table(made), 200) if "yes" in line or "aband" in line
    ]
    assert rows == [["1", "1", "1", "yes"], ["2", "2", "1", "abandoned"], ["2", str(leapt + 3), "2", "yes"]]
    narrow = drawn(certificates_table(made, 80), 80)
    assert max(map(len, narrow)) <= 80 and "its KL" in narrow[1] and "set digest" not in narrow[1]


@pytest.fixture
def long_run(coordinator, scripted_run):
    run = scripted_run(steps=100, step_s=0.0001)
    run.submitted_at = time.time() - 10
    slots = [[n, 0, n + 1, "i-1"] for n in range(500)]
    events = [
        {
            "id": 1,
            "type": "slots_assigned",
            "time": 0.0,
            "run": "runs/r-1",
            "data": {"step": 1, "slots": slots},
        },
        {"id": 2, "type": "noted", "time": 0.0, "run": "runs/r-1", "data": {"text": "trainer-0 is slow"}},
    ]
    stream = "".join(f"id: {event['id']}\ndata: {json.dumps(event)}\n\n" for event in events)
    instances = [
        {"name": "instances/rollout-0", "incarnation": "i-1"},
        {"name": "trainer-0", "incarnation": "i-2"},
    ]
    coordinator.routes |= {
        "GET /v1/runs/r-1/events": (200, stream),
        "GET /v1/instances": (200, {"instances": instances}),
    }
    return run


def test_lines_of_a_log_are_short_and_can_be_of_one_instance(headrace, long_run):
    lines = headrace("run", "logs", "r-1").stdout.splitlines()
    assert len(lines) == 2 and max(map(len, lines)) < 120 and "slots=(500 entries)" in lines[0]
    for name, words in (("rollout-0", "slots_assigned"), ("trainer-0", "is slow")):
        (line,) = headrace("run", "logs", "r-1", "--instance", name).stdout.splitlines()
        assert words in line


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("run_state_changed", {"state": "PAUSED", "reason": "pause asked for"}, "PAUSED: pause asked for"),
        ("run_state_changed", {"state": "RUNNING", "reason": ""}, "RUNNING"),
        ("noted", {"text": "trainer-0 is slow"}, "trainer-0 is slow"),
        ("version_restored", {"checkpoint": "step-4", "ordinal": 4}, "goes on from step 4 (step-4)"),
        ("version_restored", {"checkpoint": "c", "ordinal": 4, "recovery": True}, "rewound to step 4 (c)"),
        (
            "stage_ended",
            {"what": "rollout-0 starts its engine", "seconds": 41.26},
            "rollout-0 starts its engine: 41.3 s",
        ),
        (
            "step_committed",
            {
                "certificate": {},
                "view": {"step": 3, "reward_mean": 0.5, "trained": 32, "dropped": 1},
            },
            "step 3: reward 0.500, 32 trained, 1 dropped",
        ),
        (
            "evaluated",
            {"view": {"kind": "heldout", "step": 5, "score": 0.75, "answers": 80}},
            "heldout at step 5: 0.750 over 80 answers",
        ),
        ("checkpoint_saved", {"name": "lineage-1/step-3", "step": 3}, "name=lineage-1/step-3 step=3"),
    ],
)
def test_events_are_told_in_words_within_80_columns(kind, data, words):
    line = event_line(Event.from_json({"id": 1234, "type": kind, "time": 0.0, "run": "runs/r", "data": data}))
    assert line.endswith(f" {words}") and kind in line and len(line) <= 80


def test_a_log_of_an_unknown_instance_names_those_that_there_are(headrace, long_run):
    result = headrace("run", "logs", "r-1", "--instance", "rollout-7")
    assert result.returncode == 2 and result.stdout == ""
    assert "no instance 'rollout-7'" in result.stderr and "rollout-0, trainer-0" in result.stderr


def test_a_watch_on_a_pipe_prints_every_step(headrace, long_run):
    said = headrace("run", "watch", "r-1").stdout
    assert [f"step {number}/100 " in said for number in range(1, 101)] == [True] * 100


ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_makes_a_model_before_it_is_used_and_names_files_that_exist():
    text = (ROOT / "README.md").read_text()
    own = text[text.index("## Your own run") :]
    assert own.index("presets.tiny .headrace/models/tiny") < own.index("run submit examples/tiny.yaml")
    sent = re.findall(r"(?:-d|--data-binary) @(\S+)", text)
    assert sent and all((ROOT / file).is_file() for file in sent)


def test_durations_are_the_same_everywhere(headrace):
    said = " ".join(headrace("demo", "--help").stdout.replace("│", " ").split())
    assert "tiny (about a minute)" in said and "smollm2 (about four minutes)" in said
    started = (ROOT / "docs/getting-started.md").read_text()
    assert "about a minute" in started and "about four minutes" in started
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "about a minute after the set-up" in readme and "takes 3.6 minutes" in readme


@pytest.mark.parametrize(
    "text", ["{} cannot be read: No such file or directory", "{}:score: no such file {}", "{} does not exist"]
)
def test_a_file_that_services_lack_and_this_machine_has_is_said_to_be_here(tmp_path, text):
    (file := tmp_path / "rows.jsonl").write_text("")
    for path, here in ((file, True), (tmp_path / "none.jsonl", False)):
        given = HeadraceError(
            "INVALID", "1 problem", [Problem("data.options.path", text.replace("{}", str(path)), "fix")]
        )
        (found,) = refused(given).problems
        assert (
            found.fix.startswith("fix")
            and (f"HEADRACE_FILES={tmp_path} docker compose up" in found.fix) is here
        )
    given = HeadraceError(
        "INVALID", "1 problem", [Problem("data.options.path", f"{file} line 1 is wrong", "fix")]
    )
    assert refused(given).problems[0].fix == "fix", "the services have read it"
    text = f"no such file {tmp_path}/none.py; paths start at {tmp_path}"
    absent = HeadraceError("INVALID", "1 problem", [Problem("reward.scorers[0].name", text, "fix")])
    assert refused(absent).problems[0].fix == "fix", "the folder is here; the file is nowhere"


def test_texts_of_users_steer_no_terminal(capsys):
    """A run's name, a print of users' code, an answer: none is markup, a link, or a command to the terminal."""
    from headrace_cli.output import _console

    hostile = "a\x1b]8;;http://x\x07b\x9b31m\u202egnp\r[red]c[/] :boom:"
    _console(width=200).print(hostile)
    said = capsys.readouterr().out
    assert not set(said) & set("\x1b\x07\x9b\u202e\r")
    assert "[red]c[/] :boom:" in said and "\\u202e" in said


UNMEASURED = ("reward_mean", "tokens_per_s", "max_staleness")


@pytest.mark.parametrize("name", UNMEASURED)
def test_a_figure_that_nobody_measured_is_a_dash(name):
    known = {each: None if each == name else 7 for each in UNMEASURED}
    step = Step(
        step=1, version=2, wall_s=1.5, tokens=0, stage_s=dict.fromkeys(STAGES, 1.0), devices={}, trained=0, dropped=8,
        figures={}, **known,
    )  # fmt: skip
    assert step_line(step, 3, {}).count("=–") == 1
    assert drawn(steps_table([step], [], 120), 120)[-2].count("–") == 1
    assert figures([step], 60)
    assert measured(None) == measured(float("nan")) == "–" and measured(0.0, ".2f") == "0.00"


def test_a_step_of_given_answers_speaks_of_its_loss_and_of_nothing_that_was_sampled():
    step = Step(
        step=1, version=2, wall_s=1.5, tokens=70, stage_s={"learn": 1.0}, devices={}, trained=8, dropped=0,
        figures={"loss": 0.5}, reward_mean=None, tokens_per_s=47.0, max_staleness=None,
    )  # fmt: skip
    said = [step_line(step, 3, {1: 0.6}), drawn(steps_table([step], [], 200), 200), figures([step], 60)]
    assert "0.5000" in step_line(step, 3, {}) and "loss 0.5000" in figures([step], 60)[0].plain
    words = " ".join(str(line) for part in said for line in ([part] if isinstance(part, str) else part))
    assert "loss" in words and not any(word in words for word in ("reward", "generate", "score", "staleness"))
