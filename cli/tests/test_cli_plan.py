"""`headrace plan`: without a fleet, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from headrace.client import Workflow, load_spec
from headrace_cli.errors import CommandError
from headrace_cli.planning import explain_file
from headrace_cli.show.plan import gantt, plan_lines, seconds
from headrace_schema.spec import RunSpec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PLANS = EXAMPLES / "plans"


@pytest.mark.parametrize(
    ("name", "devices"), [("reasoning", 8), ("reasoning", 64), ("embodied", 8), ("embodied", 1024)]
)
def test_examples_are_planned_and_the_plan_is_the_best(name, devices):
    plan = explain_file(PLANS / f"{name}.yaml", [], devices, None, None)
    assert json.loads(json.dumps(plan)) == plan
    assert plan["devices"] == {"gpu": devices}
    assert plan["lower_bound_s"] <= plan["step_s"]
    assert all(more["step_s"] <= plan["step_s"] for more in plan["more_devices"])
    assert all(other["step_s"] is None or other["step_s"] >= plan["step_s"] for other in plan["alternatives"])
    assert max(bar["first"] + bar["count"] for bar in plan["timeline"]) <= devices
    assert max(bar["end"] for bar in plan["timeline"]) <= plan["step_s"] * (1 + 1e-9)
    assert 0 <= plan["idle_share"] < 1


def test_a_neighbours_memory_makes_collocated_training_slow():
    """The published collocated run trains for 474 s beside policy and simulator, and for 190.5 s beside less."""
    plan = explain_file(PLANS / "embodied.yaml", [], 16, None, None)
    times = {other["mode"]: other["step_s"] for other in plan["alternatives"]}
    assert times["collocated, resident"] == pytest.approx(711.7, rel=0.05)
    assert plan["step_s"] < 0.7 * times["collocated, resident"]


def test_json_is_one_document_without_a_fleet(headrace):
    done = headrace("plan", str(PLANS / "embodied.yaml"), "--json", HEADRACE_URL="")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["note"].startswith("a prediction")


@pytest.mark.parametrize("width", [60, 120])
def test_the_text_fits_the_terminal(width):
    plan = explain_file(PLANS / "reasoning.yaml", [], 16, None, None)
    lines = list(plan_lines(plan, width))
    assert max(map(len, lines)) <= width
    for words in ("bottleneck: ", "collocated, resident: ", "with 32 gpu: ", "a prediction", "█"):
        assert any(words in line for line in lines), words


def test_a_run_spec_is_planned_with_a_profile_and_refused_without(headrace):
    spec = EXAMPLES / "smollm2.yaml"
    bare = headrace("plan", str(spec), "--devices", "8")
    assert bare.returncode == 2 and "profile" in bare.stderr and "--profile FILE" in bare.stderr
    plan = explain_file(spec, [], 8, None, PLANS / "profile_reasoning_7b_h100.yaml")
    assert plan["items"] == 32 and plan["workflow"] == "reasoning"


def test_a_run_whose_answers_the_data_gives_has_nothing_to_place():
    spec = EXAMPLES / "algorithms" / "supervised.yaml"
    with pytest.raises(CommandError, match=r"workflow: supervised runs have one stage.*--dry-run"):
        explain_file(spec, [], 8, None, PLANS / "profile_reasoning_7b_h100.yaml")


def test_a_workflow_of_ones_own_is_planned_stage_by_stage(headrace, tmp_path):
    spec, profile = EXAMPLES / "two_rewards.yaml", tmp_path / "profile.yaml"
    stages = {"generate": {"item_s": 0.1}, "score": {"item_s": 0.001}, "learn": {"item_s": 0.05}}
    profile.write_text(yaml.safe_dump({"stages": stages}))
    lacking = headrace("plan", str(spec), "--devices", "8", "--profile", str(profile))
    assert lacking.returncode == 2 and "judge" in lacking.stderr
    profile.write_text(yaml.safe_dump({"stages": {**stages, "judge": {"item_s": 0.02}}}))
    plan = explain_file(spec, [], 8, None, profile)
    assert {bar["stage"] for bar in plan["timeline"]} == {"generate", "score", "judge", "learn"}


def test_the_client_builds_the_graph_of_the_document():
    flow = Workflow()
    scored = flow.score(flow.answers)
    judged = flow.score(scored, name="judge", scorers=[{"name": "exact", "weight": 2.0}], at_least=1.0)
    flow.learn(judged)
    written = load_spec(EXAMPLES / "two_rewards.yaml")
    bare = {key: value for key, value in written.items() if key != "workflow"}
    bare["reward"] = {key: value for key, value in written["reward"].items() if key != "stages"}
    assert RunSpec.model_validate(flow.into(bare)) == RunSpec.model_validate(written)


def test_a_cluster_file_and_overrides(headrace, tmp_path):
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(yaml.safe_dump({"gpu": {"count": 4, "memory_gib": 141}}))
    plan = explain_file(PLANS / "embodied.yaml", ["items=64"], None, cluster, None)
    assert plan["devices"] == {"gpu": 4} and plan["items"] == 64
    both = headrace("plan", str(PLANS / "embodied.yaml"), "--cluster", str(cluster), "--devices", "8")
    assert both.returncode == 2 and "--devices" in both.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("workflow.nme=x", "workflow.nme"),
        ("items=0", "items"),
        ("cluster.gpu.memory_gib=20", "stages.learn"),
        ("workflow.critic=true", "stages.infer_critic"),
    ],
)
def test_mistakes_name_the_key(change, words):
    with pytest.raises(CommandError) as refused:
        explain_file(PLANS / "reasoning.yaml", [change], 8, None, None)
    assert refused.value.exit_code == 2
    assert words in refused.value.message and words in {item.key for item in refused.value.problems}


def test_a_chart_shows_when_and_how_much():
    bars = [
        {"stage": "generate", "kind": "gpu", "first": 0, "count": 4, "begin": 0.0, "end": 5.0, "busy": 5.0},
        {"stage": "learn", "kind": "gpu", "first": 4, "count": 1, "begin": 5.0, "end": 10.0, "busy": 2.5},
    ]
    first, second, scale = gantt(bars, 10.0, 60)
    assert first.startswith("generate gpu 0-3 │█") and "░" not in first
    assert second.index("░") >= len(first) - 1
    assert abs(second.count("█") - second.count("░")) <= 1
    assert scale.endswith("10 s") and seconds(5.0) in scale


@pytest.mark.parametrize(("step_s", "width"), [(3.5, 60), (246.0, 60), (1061.3, 60), (0.0123, 120)])
def test_marks_of_a_scale_keep_apart(step_s, width):
    bar = {"kind": "gpu", "first": 0, "count": 64, "begin": 0.0, "end": step_s, "busy": step_s}
    *_, scale = gantt([{"stage": "a_stage_with_a_name_of_so_many_letters", **bar}], step_s, width)
    marks = [mark for mark in scale.strip().lstrip("└").split("─") if mark]
    assert marks[0] == "0 s" and marks[-1] == seconds(step_s)
    assert {*marks} <= {seconds(step_s * part / 4) for part in range(5)}, scale


def test_two_kinds_of_devices_say_which_of_them_more_would_help(tmp_path):
    """Simulators on CPU slots bound the step: more GPUs alone give little, and their idle time is told apart."""
    stages = {
        "generate": {"item_s": 0.1},
        "simulate": {"kind": "cpu", "item_s": 4.0},
        "learn": {"item_s": 0.1},
    }
    spec = tmp_path / "plan.yaml"
    request = {"workflow": {"name": "embodied"}, "items": 64, "profile": {"stages": stages}}
    spec.write_text(yaml.safe_dump({**request, "cluster": {"gpu": {"count": 4}, "cpu": {"count": 8}}}))
    plan = explain_file(spec, [], None, None, None)
    gain = {(more["devices"]["gpu"], more["devices"]["cpu"]): more["faster"] for more in plan["more_devices"]}
    assert gain[4, 16] > 0.5 > 0.1 > gain[8, 8] and gain[8, 16] >= gain[4, 16]
    assert plan["idle_shares"]["gpu"] > 0.8 > plan["idle_shares"]["cpu"]
    assert any("gpu idle 9" in line and "cpu idle" in line for line in plan_lines(plan, 120))


@pytest.mark.parametrize("name", ["reasoning", "embodied"])
def test_a_plan_is_simulated_beside_its_prediction(name, tmp_path, headrace):
    trace = tmp_path / "trace.json"
    done = headrace(
        "plan", str(PLANS / f"{name}.yaml"), "--devices", "16", "--set", "items=512", "--simulate",
        "--iterations", "2", "--seed", "7", "--chrome-trace", str(trace), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    simulation = plan["simulation"]
    assert simulation["predicted_s"] == pytest.approx(plan["step_s"])
    assert len(simulation["steps_s"]) == 2 and simulation["seed"] == 7
    labelled = sum(row["device_s"] for row in simulation["device_seconds"])
    assert labelled == pytest.approx(16 * simulation["step_s"])
    events = json.loads(trace.read_text())["traceEvents"]
    spent = sum(event["dur"] * event["args"]["devices"] for event in events) / 1e6
    assert spent == pytest.approx(16 * sum(simulation["steps_s"]), rel=1e-3)
    explained = simulation["lengths_s"] + simulation["whole_items_s"]
    assert explained == pytest.approx(simulation["step_s"] - simulation["predicted_s"])


def test_the_simulations_text_fits_the_terminal():
    wanted = {"iterations": 6, "seed": 0, "chrome_trace": False}
    plan = explain_file(PLANS / "reasoning.yaml", ["items=512"], 8, None, None, wanted)
    lines = list(plan_lines(plan, 60))
    assert max(map(len, lines)) <= 60
    text = " ".join(line.strip() for line in lines)
    for words in (
        "simulated: ",
        "predicted ",
        "decode",
        "train",
        "device-s",
        "from the drawn lengths",
    ):
        assert words in text, words


def test_a_trace_that_cannot_be_written_and_too_many_items_are_refused(headrace, tmp_path):
    spec = str(PLANS / "embodied.yaml")
    lost = headrace("plan", spec, "--chrome-trace", str(tmp_path / "no" / "trace.json"))
    assert lost.returncode == 2 and "--chrome-trace" in lost.stderr
    many = headrace("plan", spec, "--simulate", "--iterations", "100", "--set", "items=100000")
    assert many.returncode == 2 and "simulation.iterations" in many.stderr and "2000000" in many.stderr


def planned(spec: str, placement: dict, profile: Path, devices: int | None = None) -> dict:
    return explain_file(EXAMPLES / spec, [f"placement={json.dumps(placement)}"], devices, None, profile)


ROBOT, ROBOT_COSTS = "embodied/pendulum.yaml", PLANS / "profile_embodied_7b_h100.yaml"


@pytest.mark.parametrize(
    ("placement", "devices", "counts", "mode"),
    [
        ({"rollout": "0-3", "simulator": "4-5", "trainer": "6-7"}, None, (4, 2, 2), "disaggregated"),
        ({"rollout": "0-3", "simulator": "gpu:4", "trainer": "all"}, 8, (4, 1, 8), "collocated"),
        ({"rollout,simulator,trainer": "all"}, 8, (4, 4, 8), "collocated"),
        ({"rollout": "a/0", "simulator": "a/1", "trainer": "b/0-1"}, None, (1, 1, 2), "disaggregated"),
    ],
)
def test_simulators_with_devices_are_planned_on_them(placement, devices, counts, mode):
    plan = planned(ROBOT, placement, ROBOT_COSTS, devices)
    stages = ("generate", "simulate", "learn")
    assert tuple(len(plan["seats"][stage]) for stage in stages) == counts
    lines = "\n".join(plan["tree_text"])
    assert all(
        f"{stage} on {count} gpu[" in lines or count == 1 for stage, count in zip(stages, counts, strict=True)
    )
    assert plan["mode"].startswith(mode) and "side by side" in lines
    ends = {bar["stage"]: (bar["begin"], bar["end"]) for bar in plan["timeline"]}
    assert ends["learn"][0] >= ends["generate"][1] * 0.99 or mode == "disaggregated"
    (free,) = plan["alternatives"]
    assert free["step_s"] <= plan["step_s"] * (1 + 1e-9) and "the placement takes +" in free["why"]
    assert 0 <= plan["idle_share"] < 1
    assert any("gpu[" in line for line in plan_lines(plan, 100))


@pytest.mark.parametrize(
    ("placement", "devices", "words"),
    [
        ({"rollout": "0", "simulator": "1", "trainer": "all"}, None, "placement.trainer: all"),
        ({"rollout": "0-3", "simulator": "4", "trainer": "5"}, 4, "6 gpu are named and the cluster has 4"),
        ({"mode": "hybrid", "rollout": "0", "simulator": "1", "trainer": "2"}, None, "placement.mode"),
        ({"rollout,simulator": "0", "trainer": "1"}, None, "placement.simulator"),
        (
            {"rollout,simulator": "0", "trainer": "1", "joint": {"rollout": 0.5, "simulator": 0.5}},
            None,
            "placement.joint",
        ),
    ],
)
def test_simulators_devices_that_cannot_be_planned_name_the_key(placement, devices, words):
    with pytest.raises(CommandError) as caught:
        planned(ROBOT, placement, ROBOT_COSTS, devices)
    assert words in f"{caught.value} {caught.value.problems}"


def test_a_measured_simulator_is_of_the_host_and_the_plan_says_so(tmp_path):
    """`headrace profile` measures environments as the host's: their devices change no second."""
    profile = tmp_path / "profile.yaml"
    costs = {"generate": {"item_s": 0.1, "kind": "cpu"}, "learn": {"item_s": 0.2, "kind": "cpu"}}
    costs["simulate"] = {"host_item_s": 0.3, "kind": "host"}
    profile.write_text(yaml.safe_dump({"stages": costs}))
    one = planned(ROBOT, {"rollout": "0", "simulator": "1", "trainer": "2"}, profile)
    two = planned(ROBOT, {"rollout": "0", "simulator": "1-2", "trainer": "3"}, profile)
    assert one["step_s"] == two["step_s"] and "the profile of simulate is of the host" in one["note"]
    assert one["devices"] == {"cpu[0]": 1, "cpu[2]": 1, "host": 1}


def test_how_trainers_hold_the_model_is_shown_with_the_memory_of_their_hosts(headrace, tmp_path):
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    sets = [f"model.path={tmp_path}", "trainer.ranks=4"]
    given = [str(EXAMPLES / "smollm2.yaml"), *(word for each in sets for word in ("--set", each))]
    given += ["--devices", "8", "--profile", str(PLANS / "profile_reasoning_7b_h100.yaml")]
    done = headrace("plan", *given, "--gpu-gib", "80", "--json", HEADRACE_URL="")
    assert done.returncode == 0, done.stderr
    layout = json.loads(done.stdout)["layout"]
    assert layout["layout"] == "shard: state, shard_ranks: 4" and not layout["saves_in_place"]
    assert layout["host"]["checkpoint copy"] == layout["device"]["masters"] + layout["device"]["moments"] > 0
    words = headrace("plan", *given, "--gpu-gib", "80", HEADRACE_URL="").stdout
    assert "of its host, a rank: " in words and "checkpoint copy 0.0" in words
    alone = headrace("plan", *given, "--host-gib", "80", HEADRACE_URL="")
    assert alone.returncode == 2 and "--gpu-gib" in alone.stderr


LARGE, ITS_COSTS = EXAMPLES / "qwen-72b-8-gpus.yaml", PLANS / "profile_reasoning_72b_h100.yaml"
QWEN_72B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


def test_a_model_over_eight_gpus_is_planned_in_whole_engines():
    plan = explain_file(LARGE, [], 8, None, ITS_COSTS)
    (bar,) = (bar for bar in plan["timeline"] if bar["stage"] == "generate")
    assert (bar["count"], plan["mode"]) == (8, "collocated, offloaded")
    more = explain_file(LARGE, [], 20, None, ITS_COSTS)
    (bar,) = (bar for bar in more["timeline"] if bar["stage"] == "generate")
    assert bar["count"] in (8, 16), "20 are no whole engines"
    with pytest.raises(CommandError, match="an engine of 8 GPUs is wanted and there are 4"):
        explain_file(LARGE, [], 4, None, ITS_COSTS)


def test_what_a_spec_leaves_to_its_gpus_is_shown_with_why(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_72B))
    sets = [f"model.path={tmp_path}", "rollout.engine_options={}"]
    plan = explain_file(LARGE, sets, 8, None, ITS_COSTS, gpu_gib=80.0)
    decided = {each["key"]: each["value"] for each in plan["decided"]}
    assert decided == {
        "rollout.engine_options.gpu_memory_utilization": 0.9,
        "rollout.engine_options.tensor_parallel_size": 4,
        "rollout.max_concurrency": 192,
        "trainer.micro_batch_tokens": 16_384,
    }
    words = " ".join(" ".join(plan_lines(plan, 100)).split())
    assert "tensor_parallel_size: 4, decided by the GPUs: weights of 135.4 GiB leave room" in words
    larger = explain_file(LARGE, sets, 8, None, ITS_COSTS, gpu_gib=141.0)
    assert {each["key"]: each["value"] for each in larger["decided"]}[
        "rollout.engine_options.tensor_parallel_size"
    ] == 2
    small = explain_file(EXAMPLES / "tiny.yaml", [], 2, None, PLANS / "profile_reasoning_7b_h100.yaml")
    assert small["decided"][0]["key"] == "rollout.engine" and small["decided"][0]["value"] == "vllm"


@pytest.mark.parametrize(("state_gib", "fits"), [(15, True), (90, False)])
def test_scorers_with_devices_are_planned_on_them_with_their_memory(tmp_path, state_gib, fits):
    profile = tmp_path / "profile.yaml"
    costs = {name: {"item_s": 0.1} for name in ("generate", "learn")}
    costs["score"] = {"item_s": 0.05, "memory": {"state_gib": state_gib}, "load_s": 2}
    profile.write_text(yaml.safe_dump({"stages": costs, "memory_gib": {"gpu": 80}}))
    placement = {"rollout": "0-1", "reward": "2", "trainer": "0-2"}
    if not fits:
        with pytest.raises(CommandError, match="score"):
            planned("tiny.yaml", placement, profile)
        return
    plan = planned("tiny.yaml", placement, profile)
    assert plan["seats"] == {"generate": ["0", "1"], "score": ["2"], "learn": ["0", "1", "2"]}
    assert plan["mode"] == "collocated, offloaded" and "score on 1 gpu[2]" in "\n".join(plan["tree_text"])
    ends = {bar["stage"]: (bar["begin"], bar["end"]) for bar in plan["timeline"]}
    assert ends["learn"][0] >= ends["score"][1] * 0.99, "the trainer takes the scorers' device after them"
