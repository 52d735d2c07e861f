"""Plans without a fleet: files to the planner's plain data, and its answer. Prints nothing.

The one place of the command that calls the planner.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_cli.errors import EXIT_USER_ERROR, CommandError, refused, user_error
from headrace_cli.profiling import stored_profile

if TYPE_CHECKING:
    from headrace_schema.gpu_defaults import Default
    from headrace_schema.sections.running import PlacementSection
    from headrace_schema.spec import RunSpec

HOST_GIB, GPUS_PER_HOST = 1800.0, 8
"""What the trainers' layout is planned for where nothing says otherwise."""
LAYOUT_S = 120.0
LARGEST = 1024
"""GPUs up to which sizes are listed where the command says no number."""
HOST = "host"
EVERY = "all"
"""In a placement: every device."""
COMPARES_THE_BATCH = {"clip_cov", "kl_cov", "reinforce_pp", "reinforce_pp_baseline"}
"""Built-in algorithms whose advantages or losses compare the whole batch."""
PROFILE_FIX = (
    "measure one with `headrace profile SPEC`, or give --profile FILE; examples/plans has two to start from"
)


def explain_file(
    file: Path,
    sets: list[str],
    devices: int | None,
    cluster: Path | None,
    profile: Path | None,
    simulation: dict[str, Any] | None = None,
    measured: Path | None = None,
    gpu_gib: float | None = None,
) -> dict[str, Any]:
    """The planner's explanation for a spec file; CommandError (exit code 2) names every key that is wrong.

    `simulation`: iterations, seed and chrome_trace; without it the plan is predicted alone. `measured`: folder of the
    profiles that `headrace profile` stored, of which the run spec's is taken where none is given. `gpu_gib`: memory of
    a GPU; default: what the profile says. With it, `decided` lists what a run's spec leaves to its GPUs, and why.
    """
    if devices is not None and cluster is not None:
        raise user_error("--devices", "is given beside --cluster", "give one of them")
    document = _read(file, sets)
    request = _of_run_spec(document) if "model" in document else document
    if profile is not None:
        request["profile"] = _read(profile)
    elif isinstance(request.get("profile"), str):
        request["profile"] = _read(file.parent / request["profile"])
    elif "profile" not in request:
        stored = stored_profile(measured, document) if measured and "model" in document else None
        if stored is None:
            raise user_error("profile", "there is no measured profile of this model", PROFILE_FIX)
        request["profile"] = _read(stored)
    if "model" in document:
        _with_infer(request, document)
        _with_seats(request, document, devices)
        decided = _with_engines(request, document, devices, gpu_gib)
    if cluster is not None:
        request["cluster"] = _read(cluster)
    if devices is not None:
        given = request.get("cluster")
        kinds = given if isinstance(given, dict) else {}
        kind = kind_of(request["profile"])
        same = kinds.get(kind)
        request["cluster"] = {**kinds, kind: {**(same if isinstance(same, dict) else {}), "count": devices}}
    elif "cluster" not in request and "seats" in request:
        named = {name for names in request["seats"]["stages"].values() for name in names}
        request["cluster"] = {kind_of(request["profile"]): {"count": len(named)}}
    elif "cluster" not in request:
        raise user_error("cluster", "no devices are named", "give --devices N or --cluster FILE")
    if HOST in kinds_of(request["profile"]) and isinstance(request["cluster"], dict):
        request["cluster"] = {HOST: {"count": 1}, **request["cluster"]}
    if simulation is not None:
        request["simulation"] = simulation
    found = _explained(request)
    return {**found, "decided": [vars(each) for each in decided]} if "model" in document else found


def trainer_layout(file: Path, sets: list[str], gpu_gib: float, host_gib: float = HOST_GIB) -> dict[str, Any]:
    """How the trainers would hold a run's model on GPUs of so many GiB, eight a host with `host_gib`: the trainer's own
    plan, made in a process of its own, or the `problem` in words. Needs the trainer's package, and the model's
    configuration.

    CommandError (exit code 2) for a file that is no run spec of a language model on fsdp.
    """
    from importlib.util import find_spec

    from headrace_schema.openings import TrainerConfig
    from headrace_schema.spec import RunSpec

    document = _read(file, sets)
    if "model" not in document:
        raise user_error("--gpu-gib", "the file is no run spec and names no model", "leave it out")
    run = RunSpec.model_validate(document)
    if run.trains_robots or run.trainer.backend != "fsdp":
        raise user_error(
            "--gpu-gib", "only the backend fsdp chooses how a model lies on its ranks", "leave it out"
        )
    if find_spec("headrace_trainer") is None:
        raise user_error("--gpu-gib", "headrace-trainer is not installed here", "install it, or leave it out")
    warmup = run.trainer.warmup.model_copy(
        update={"steps": 0}
    )  # its examples are the data's, which is not read
    run = run.model_copy(update={"trainer": run.trainer.model_copy(update={"warmup": warmup})})
    asked = {
        "config": json.loads(TrainerConfig.of(run).model_dump_json()),
        "gpu_bytes": int(gpu_gib * 2**30),
        "host_bytes": int(host_gib * 2**30),
        "ranks_per_host": GPUS_PER_HOST,
    }
    command = [sys.executable, "-m", "headrace_trainer.layouts"]
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, timeout=LAYOUT_S, check=True
        )
    except (subprocess.SubprocessError, OSError) as error:
        return {"problem": f"the trainer's plan failed: {error}"}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def kinds_of(profile: Any) -> set[str]:
    """Kinds of device that a profile's document names, however wrong it is otherwise."""
    stages = profile.get("stages") if isinstance(profile, dict) else None
    listed = stages.values() if isinstance(stages, dict) else ()
    sections = [section for one in listed for section in (one if isinstance(one, list) else [one])]
    return {str(section.get("kind", "gpu")) for section in sections if isinstance(section, dict)}


def kind_of(profile: Any) -> str:
    """The kind that `--devices N` counts: the profile's only one beside the host, else gpu."""
    kinds = kinds_of(profile) - {HOST}
    return kinds.pop() if len(kinds) == 1 else "gpu"


def check_profile(document: dict[str, Any]) -> dict[str, float]:
    """The worst error of each stage's fit; CommandError (exit code 2) for a profile that cannot be fitted."""
    from headrace_planner import PlanError
    from headrace_planner.documents import ProfileDocument

    try:
        return {made.stage: made.error for made in ProfileDocument.model_validate(document).made()}
    except PlanError as error:
        first = error.problems[0]
        raise user_error(first.key, first.problem, first.fix) from error


def write_trace(trace: dict[str, Any], file: Path) -> None:
    """Writes a Chrome trace; CommandError when the file cannot be written."""
    try:
        file.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        raise user_error(
            "--chrome-trace", f"{file}: {error.strerror}", "name a file that can be written"
        ) from error


def _read(file: Path, sets: list[str] | None = None) -> dict[str, Any]:
    from headrace.client import HeadraceError, load_spec

    try:
        return load_spec(file, sets or [])
    except HeadraceError as error:
        raise refused(error) from error


def _of_run_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """What a run spec says of its workflow: the batch, the groups and the environments."""
    from headrace_schema.spec import RunSpec

    from headrace_cli.dry_run import check_schema

    check_schema(spec)
    run = RunSpec.model_validate(spec)
    if run.is_session:
        raise user_error(
            "workflow",
            "the loop of a session says what is done when: there is nothing to plan",
            "set placement.mode: collocated, where its sides take turns, or disaggregated",
        )
    if run.has_given_answers:
        raise user_error(
            "workflow",
            f"{run.workflow} runs have one stage, which has all devices: there is nothing to place",
            "see how the trainers would hold the model: headrace run submit SPEC --dry-run",
        )
    rooms = {"environments": run.environment.count} if run.environment else {}
    bound = {"max_staleness": run.algorithm.max_staleness} if run.algorithm.max_staleness else {}
    return {"workflow": _graph_of(run), "items": run.slots_per_step, **rooms, **bound}


def _graph_of(run: RunSpec) -> dict[str, Any]:
    """The run's graph as the planner takes it."""
    graph, batch = run.graph, waits_for_batch(run)
    learns = {*graph.of("trainer")} if batch else set()
    return {
        "name": run.workflow if isinstance(run.workflow, str) else "workflow",
        "stages": list(graph.stages),
        "edges": [
            {
                "source": edge.source,
                "target": edge.target,
                "granularity": "batch" if edge.target in learns else graph.granularity(edge),
            }
            for edge in graph.edges
        ],
        "weights": [["learn", "generate"]],
        "group_size": run.algorithm.group_size,
    }


def waits_for_batch(run: RunSpec) -> bool:
    """Whether a built-in algorithm learns once the whole batch is there: several passes, or statistics of the batch.

    On a fleet the trainer says so itself. An algorithm of one's own is taken to stream unless it has several passes.
    """
    name, options = run.algorithm.name, run.algorithm.options
    passes = [options.get("epochs", 1), options.get("minibatches", 1)]
    several = any(isinstance(count, int) and count > 1 for count in passes)
    whitens = name == "ppo" and options.get("whiten", True)
    weighs = name == "gpg" and options.get("alpha") is None
    return bool(several or options.get("minibatch_size") or whitens or weighs or name in COMPARES_THE_BATCH)


def _with_infer(request: dict[str, Any], spec: dict[str, Any]) -> None:
    """A profile that has the infer pass apart makes it a stage of its own, where the run has one; else learn has it."""
    workflow, stages = request["workflow"], request["profile"].get("stages")
    options = spec.get("algorithm", {}).get("options", {})
    passes = any(options.get(key, 1) != 1 for key in ("epochs", "minibatches"))
    compares = any(options.get(key) for key in ("kl_loss_coef", "kl_reward_coef", "minibatch_size"))
    values = spec.get("algorithm", {}).get("name") == "ppo"
    if not (isinstance(stages, dict) and "infer" in stages and (passes or compares or values)):
        return
    into_learn = next(edge for edge in workflow["edges"] if edge["target"] == "learn")
    workflow["stages"].append("infer")
    workflow["edges"] += [
        {"source": "generate", "target": "infer", "granularity": "trajectory"},
        {"source": "infer", "target": "learn", "granularity": into_learn["granularity"]},
    ]


def _with_seats(request: dict[str, Any], document: dict[str, Any], devices: int | None) -> None:
    """Where simulators or scorers have devices, every stage has those that the placement names."""
    from headrace_schema.rules.acting import apart
    from headrace_schema.spec import RunSpec

    run = RunSpec.model_validate(document)
    placement, stages = run.placement, request["workflow"]["stages"]
    named = [key for key in ("simulator", "reward") if getattr(placement, key)]
    if not named:
        return
    if placement.joint is not None:
        problem = "the planner knows no device at which two stages are at work at the same time"
        raise user_error("placement.joint", problem, "plan without it")
    if placement.mode == "hybrid":
        problem = f"with placement.{named[0]} the planner knows no devices that change sides within a step"
        raise user_error("placement.mode", problem, "plan with collocated or disaggregated")
    scoring = run.graph.of("reward")
    if placement.reward and (untold := [stage for stage in scoring if stage not in stages]):
        problem = f"it has no stage {untold[0]!r}, as placement.reward names devices for it"
        raise user_error("profile", problem, "measure a run with placement.reward, or add the stage")
    sides = {side: _devices_of(placement, side, devices) for side in ("rollout", "trainer", *named)}
    if placement.simulator:
        both = sides["rollout"], sides["simulator"]
        sides["rollout"], sides["simulator"] = apart(*both, run.rollout.instances * run.engines)
    seats = {"generate": sides["rollout"], "learn": sides["trainer"]}
    if placement.simulator:
        seats["simulate"] = sides["simulator"]
    if placement.reward:
        seats |= dict.fromkeys(scoring, sides["reward"])
    if "infer" in stages:
        seats["infer"] = sides["trainer"]
    flow = {"streamed": placement.pipelined, "resident": placement.resident}
    request["seats"] = {"stages": seats, **flow}


def _with_engines(
    request: dict[str, Any], document: dict[str, Any], devices: int | None, gpu_gib: float | None
) -> list[Default]:
    """Generates on whole engines alone: on multiples of the GPUs that one spans. What a run leaves to its GPUs."""
    from headrace_schema.gpu_defaults import SPAN, Default, Gpus, gpu_defaults, with_defaults
    from headrace_schema.model_size import text_config
    from headrace_schema.sections.generating import engine_gpus
    from headrace_schema.spec import RunSpec

    run, profile = RunSpec.model_validate(document), request["profile"]
    if kind_of(profile) != "gpu" or run.trains_robots:
        return []
    memories, stages = profile.get("memory_gib"), profile.get("stages")
    known = memories.get("gpu") if isinstance(memories, dict) else None
    memory = gpu_gib or (known if isinstance(known, (int, float)) else 0.0)
    on_host = min(devices or GPUS_PER_HOST, GPUS_PER_HOST)
    gpus = Gpus(int(memory * 2**30), on_host, devices or 0, on_host)
    left_open = (
        not {"engine", "engine_options"} & run.rollout.model_fields_set or run.rollout.engine == "auto"
    )
    engine = "vllm" if left_open else run.rollout.engine
    decided = gpu_defaults(run, engine, text_config(run.model), gpus)
    if left_open:
        decided.insert(0, Default("rollout.engine", engine, "where it is installed, a run on GPUs takes it"))
    each = run.engines * engine_gpus(with_defaults(run, decided).rollout.engine_options)
    if devices is not None and each > devices:
        raise user_error(
            SPAN, f"an engine of {each} GPUs is wanted and there are {devices}", "use a smaller size"
        )
    listed = stages.get("generate") if isinstance(stages, dict) else None
    sections = [one for one in (listed if isinstance(listed, list) else [listed]) if isinstance(one, dict)]
    for section in sections:  # What is wrong with them the planner says; sizes of their own stay.
        replica = section.get("replica_devices", 1)
        if type(replica) is int and 0 < replica < each and each % replica == 0 and "sizes" not in section:
            section["sizes"] = list(range(each, (devices or LARGEST) + 1, each))
    return decided


def _devices_of(placement: PlacementSection, side: str, devices: int | None) -> list[str]:
    """The devices of a side: "cpu:0" and "0" are one; "all" are as many as the command was given."""
    found: list[str] = []
    for name in getattr(placement, side):
        where, _, own = name.rpartition("/")
        if own == EVERY and devices is None:
            raise user_error(f"placement.{side}", f"{name} is as many as there are", "give --devices N")
        numbers = map(str, range(devices or 0)) if own == EVERY else [own.rpartition(":")[2]]
        found += [f"{where}/{number}" if where else number for number in numbers]
    return list(dict.fromkeys(found))


def _explained(request: dict[str, Any]) -> dict[str, Any]:
    from headrace.client.errors import Problem
    from headrace_planner import PlanError
    from headrace_planner.documents import PlanRequest
    from headrace_planner.explaining import explain
    from headrace_schema.problems import explain_value

    wrong = [Problem(item.key, item.problem, item.fix) for item in explain_value(PlanRequest, request)]
    if not wrong:
        try:
            return explain(PlanRequest.model_validate(request))
        except PlanError as error:
            wrong = [Problem(item.key, item.problem, item.fix) for item in error.problems]
    first = f"{wrong[0].key}: {wrong[0].problem}; {wrong[0].fix}"
    words = first if len(wrong) == 1 else f"{len(wrong)} problems"
    raise CommandError(f"no plan: {words}", reason="INVALID", exit_code=EXIT_USER_ERROR, problems=wrong)
