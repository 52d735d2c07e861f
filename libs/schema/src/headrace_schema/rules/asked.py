"""The features that `table` has rows of: what a run may ask for."""

from __future__ import annotations

from collections.abc import Iterator

from headrace_schema.rules.features import (
    Feature,
    Resolved,
    above,
    also,
    key,
    lacking,
    missing,
    option,
    options,
    resolved,
    unlike,
    value,
    when,
)
from headrace_schema.sections.generating import HOSTS, drafts, engine_hosts, quantized
from headrace_schema.sections.learning import AlgorithmSection
from headrace_schema.sections.policies import adapters_of
from headrace_schema.sections.run import RunSections
from headrace_schema.sections.running import SIDES
from headrace_schema.workflow import (
    CONVERSATIONS,
    EMBODIED,
    LEROBOT,
    PREFERENCE,
    REASONING,
    REWARD_MODEL,
    SESSION,
    SUPERVISED,
)
from headrace_schema.workflow import (
    GIVEN as GIVEN_ANSWERS,
)

EPISODES = "episodes"
"""The data source of start states, and what is short for it: `data: {heldout: 48}`."""
GROUP_RELATIVE = frozenset(
    {
        *("cispo", "clip_cov", "dapo", "dr_grpo", "gmpo", "gpg", "grpo", "gspo", "kl_cov", "opo"),
        *("passk_grpo", "reinforce_pp_baseline", "remax", "rloo", "sapo"),
    }
)
"""Built-in algorithms for which a group of one has nothing to compare; a trainer checks the others as a run opens."""
OTHERS = frozenset({"distill", "ppo", "reinforce", "reinforce_pp"})
"""Built-in algorithms that take a group of one."""
IMITATING = ("sft",)
COMPARING_TWO = ("dpo", "ipo", "simpo", "orpo", "kto")
JUDGING = ("bradley_terry", "prm")
"""Built-in algorithms of the workflows whose answers the data gives: supervised, preference, and reward_model."""
LABELLED, STEPWISE = ("kto",), ("prm",)
"""Those whose rows have one answer with a label, and one in steps that have labels; all other rows have pairs."""
KL_OPTIONS = ("kl_loss_coef", "kl_reward_coef")
"""Options of built-in algorithms that need a reference model."""
RATIO_OPTIONS = (
    *("clip_low", "clip_high", "dual_clip", "value_clip"),
    *("tau_positive", "tau_negative", "cov_coef"),
)
"""Options of built-in algorithms that act on the ratio of new to old policy alone."""
ENGINE, BACKEND = "rollout.engine_options", "trainer.backend_options"


def _changing(run: Resolved) -> Iterator[str]:
    for name in ("min_ranks", "max_ranks"):
        if getattr(run.spec.trainer, name) not in (None, run.spec.trainer.ranks):
            yield f"trainer.{name}"


def _one_update(run: Resolved, algorithm: AlgorithmSection) -> Iterator[str]:
    """Not of episodes, whose minibatches are counted in chunks."""
    given = algorithm.options
    once = given.get("epochs", 1) == given.get("minibatches", 1) == 1
    moves = algorithm.max_staleness or given.get("old_log_probs") == "engine"
    if once and not moves and not run.spec.acts_in_environments and algorithm.name in GROUP_RELATIVE | OTHERS:
        yield ""


def _ratio_options(run: Resolved, algorithm: AlgorithmSection) -> Iterator[str]:
    for _ in _one_update(run, algorithm):
        yield from (name for name in RATIO_OPTIONS if name in algorithm.options)


def _critic_head(run: Resolved, algorithm: AlgorithmSection) -> list[str]:
    return [""] if algorithm.options.get("critic", "head") == "head" else []


def _critic_path(run: Resolved, algorithm: AlgorithmSection) -> list[str]:
    given = algorithm.options.get("critic_path") is not None
    return ["critic_path"] if given and _critic_head(run, algorithm) else []


def _idle_reference(spec: RunSections) -> bool:
    return spec.algorithm.name in GROUP_RELATIVE and not any(map(spec.algorithm.options.get, KL_OPTIONS))


def _truncated(run: Resolved) -> Iterator[str]:
    """Of an evaluation: no engine checks drafts under min_p, and not every one under the others."""
    for name, neutral in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
        lacks = name == "min_p" or "rollout.engine:drafts_truncated" in run.instead
        if run.asked is not None and lacks and getattr(run.asked, name) != neutral:
            yield f"sampling.{name}"


def _quantized(run: Resolved) -> Iterator[str]:
    given = run.spec.rollout.engine_options
    if quantized(given):
        yield f"{ENGINE}.{'quantization' if given.get('quantization') else 'engine_args.kv_cache_dtype'}"


def _stepping(*names: str) -> Feature:
    """That the run's weights, or a policy's, step by one of some optimizers."""

    def asked(run: Resolved) -> Iterator[str]:
        others = {f"policies.{name}.optimizer": each.optimizer for name, each in run.spec.policies.items()}
        for where, section in {"optimizer": run.spec.optimizer, **others}.items():
            if section is not None and section.name in names:
                yield f"{where}.name"

    return Feature(f"`optimizer.name: {' or '.join(names)}`", asked, "leave {it} out (adamw then)")


def _bases_differ(spec: RunSections) -> bool:
    return spec.trainer.lora is not None and not adapters_of(spec.model, spec.trainer, spec.policies)


# Kinds of runs
ROBOT = value("workflow", EMBODIED, undo="")
NOT_ROBOT = unlike("workflow", EMBODIED, undo=f"set workflow: {EMBODIED}")
SHOWN = when(
    f"`workflow: {SUPERVISED}` with `data.source: {LEROBOT}`",
    "workflow",
    lambda spec: spec.trains_robots and not spec.acts_in_environments,
    "",
)
TEXT = when(
    "language models",
    "workflow",
    lambda spec: not spec.trains_robots,
    f"set workflow: {EMBODIED}, or workflow: {SUPERVISED} and data.source: {LEROBOT}",
)
MOMENTS = value("data.source", LEROBOT, undo="name another source")
AGENTIC = value("workflow", CONVERSATIONS, undo="")
NOT_AGENTIC = unlike("workflow", CONVERSATIONS, undo=f"set workflow: {CONVERSATIONS}")
PROMPTS_ALONE = unlike("workflow", EMBODIED, CONVERSATIONS, undo=f"set workflow: {EMBODIED}")
IMAGES_REFUSED = "leave the images out, or let the environment show them"
NOT_REASONING = unlike("workflow", REASONING, undo=f"set workflow: {REASONING}, {IMAGES_REFUSED}")
GIVEN = value("workflow", *GIVEN_ANSWERS, undo=f"set workflow: {REASONING}")
READS_ALONE = when(
    "answers that the data gives, without `evaluation.data`",
    "workflow",
    lambda spec: not spec.generates,
    "give evaluation.data, prompts that are answered in evaluations",
)
IMITATES = value("workflow", SUPERVISED, undo="")
PREFERS = value("workflow", PREFERENCE, undo="")
JUDGES = value("workflow", REWARD_MODEL, undo="")
NO_IMITATION = unlike("workflow", SUPERVISED, undo=f"set workflow: {SUPERVISED}")
NO_PREFERENCE = unlike("workflow", PREFERENCE, undo=f"set workflow: {PREFERENCE}")
NO_JUDGE = unlike("workflow", REWARD_MODEL, undo=f"set workflow: {REWARD_MODEL}")
ASKED = value("workflow", SESSION, undo=f"set workflow: {REASONING}")
NOT_ASKED = unlike("workflow", SESSION, undo=f"set workflow: {SESSION}")
ONLINE = when("`agent.online`", "agent.online", lambda spec: spec.is_online, "")
NOT_ONLINE = when("no `agent.online`", "agent.online", lambda spec: not spec.is_online, "")
AGENT, ENVIRONMENT = key("agent"), key("environment")
NO_ENVIRONMENT = also(missing("environment", "give environment.tasks"), NOT_ONLINE)
ROLES = key("environment.roles")
POLICIES = key("policies", "remove policies")
HORIZON = above("environment.horizon", 0, "remove environment.horizon")
TOGETHER = value("environment.vectorized", True, undo="remove it")
VIDEOS = key("environment.videos", "remove it")
DETERMINISTIC = value("deterministic", True, undo="set deterministic: false")

# Versions
STALE = above("algorithm.max_staleness", 0, "set algorithm.max_staleness: 0")
STRICT = value("algorithm.max_staleness", 0, undo="set algorithm.max_staleness to 1 or more")
INSTALL = key("rollout.install")
BESIDE = value(
    "rollout.install", "in_flight", "abort_and_resume", undo="set rollout.install: drain, or remove {it}"
)
IN_FLIGHT = when(
    "answers that go on with a new version",
    "rollout.install",
    lambda spec: spec.algorithm.max_staleness and spec.install == "in_flight",
    "set rollout.install: abort_and_resume or drain",
)

# Devices
MODE = "placement.mode"
AUTO = value(MODE, "auto", undo="set placement.mode: collocated or disaggregated")
CHOSEN = value(MODE, "auto", undo="set placement.mode: collocated, disaggregated or hybrid")
MEASURED = also(value(MODE, "auto", undo=AUTO.undo), above("placement.measure_steps", 0, ""))
APART = value(MODE, "disaggregated", undo="set placement.mode: collocated or hybrid")
HYBRID = value(MODE, "hybrid", undo=AUTO.undo)
SHARE = value("placement.share", True, undo="set placement.share: false")
UNSHARED = value("placement.share", False, undo="")
_TURNS = value(MODE, "collocated", undo="set placement.mode: disaggregated or hybrid")
TURNS = also(_TURNS, UNSHARED, said=_TURNS.said)
NOT_APART = when(
    "any placement but `disaggregated` without `share`",
    MODE,
    lambda spec: spec.placement.mode != "disaggregated" or spec.placement.share,
    "set placement.mode: disaggregated and placement.share: false",
)
NAMED = Feature(
    "named devices",
    lambda run: [f"placement.{side}" for side in SIDES if getattr(run.spec.placement, side)][:1],
    "remove {it}",
)
OFFLOADED = value("placement.memory", "offloaded", undo="remove placement.memory")
RESIDENT = value("placement.memory", "resident", undo="set placement.memory: offloaded")
RESIDENT_IN_TURNS = also(RESIDENT, value(MODE, "collocated", "auto", "hybrid", undo=""))
_STREAMED = unlike("placement.flow", "sequential", undo="set placement.flow: sequential")
STREAMED = also(_STREAMED, APART)
SIMULATORS = key("placement.simulator", "remove placement.simulator")
SCORERS = key("placement.reward", "remove placement.reward")
JOINT = key("placement.joint")
TRAINER_HELPERS = key("trainer.helpers", "set trainer.helpers: 0")
ROLLOUT_HELPERS = key("rollout.helpers", "set rollout.helpers: 0")
CHANGING = Feature("`trainer.min_ranks` or `max_ranks` other than `ranks`", _changing, "remove {it}")
OVER_HOSTS = when(
    f"`{HOSTS}`", HOSTS, lambda spec: engine_hosts(spec.rollout.engine_options) > 1, f"leave {HOSTS} out"
)
GPUS = resolved("GPUs", "placement", lambda run: run.gpus)

# What learns
FSDP = value("trainer.backend", "fsdp", undo="")
OTHER_BACKEND = unlike("trainer.backend", "fsdp", undo="set trainer.backend: fsdp")
ONE_POLICY = lacking("trainer.backend", "policies", "a backend that trains one policy")
TEXT_ALONE = lacking("trainer.backend", "images", "a backend that trains on text alone")
NO_LOW_RANK = lacking("trainer.backend", "adapters", "a backend that trains no adapters")
NO_HELP = lacking("trainer.backend", "helpers", "a backend that takes no gradients of helpers")
NO_CRITIC = lacking("trainer.backend", "critic", "a backend without critics")
FIXED_RANKS = lacking("trainer.backend", "changing_ranks", "a backend that needs whole models")
UNLIKE = lacking("trainer.backend", "deterministic", "a backend whose sums have an order of their own")
NO_HEADS = lacking("trainer.backend", "drafts", "a backend that trains no head that drafts")
NO_TREES = lacking("trainer.backend", "shared_prefix", "a backend that follows no tree of prefixes")
CONTEXT = also(unlike(f"{BACKEND}.context_parallel", None, 1), FSDP)
EXPERTS_DIVIDED = also(unlike(f"{BACKEND}.expert_parallel", None, 1), FSDP)
COMPILED = key(f"{BACKEND}.compile")
MUON, NOT_PLAIN_ADAMW = _stepping("muon"), _stepping("adamw_8bit", "muon")
NOT_MUON = unlike("optimizer.name", "muon", undo="set optimizer.name: muon")
SHARD_RANKS = when(
    f"`{BACKEND}.shard_ranks` below `trainer.ranks`",
    f"{BACKEND}.shard_ranks",
    lambda spec: spec.trainer.backend_options.get("shard_ranks") not in (None, spec.trainer.ranks),
)
SHARD_KEPT = value(f"{BACKEND}.shard", "state", "gradients", undo="set shard: weights, or remove {it}")
OFFLOADS_ALL = value(f"{BACKEND}.offload", "parameters", undo="")
ACTIVATIONS_AWAY = value(f"{BACKEND}.offload_activations", True, undo="remove {it}")
ACTIVATIONS_KEPT = value("trainer.gradient_checkpointing", False, undo="leave {it} out")
SEQUENCE = value(f"{BACKEND}.sequence_parallel", True, undo="remove {it}")
VIRTUAL = unlike(f"{BACKEND}.virtual_stages", None, 1, undo="remove {it}")
ONE_STAGE = value(f"{BACKEND}.pipeline_parallel", None, 1, undo="set pipeline_parallel to 2 or more")
UNDIVIDED = value(f"{BACKEND}.tensor_parallel", None, 1, undo="set tensor_parallel to 2 or more")
SHARED_PREFIX = value("trainer.shared_prefix", True, undo="set {it} to false")
NAME = "algorithm.name"
CRITIC = value(NAME, "ppo", undo="use an algorithm without a critic, such as grpo")
CRITIC_MODEL = option("critic", "model", undo="set {key}: head")
CRITIC_PATH = options("`algorithm.options.critic_path`", _critic_path, "remove {it}")
CRITIC_HEAD = options(
    "`algorithm.options` of a critic that is a head", _critic_head, "set {key}.critic: model"
)
RATIO = options(f"`algorithm.options`: {', '.join(RATIO_OPTIONS)}", _ratio_options, "remove {it}")
MORE_UPDATES = "set {key}.epochs or minibatches to 2 or more"
ONE_UPDATE = options("`algorithm.options` of one optimizer step a commit", _one_update, MORE_UPDATES)
CREDIT = option("credit", "turn")
REPLAY = option("routing_replay")
UNCORRECTED = option("correction", "none", undo="leave {it} out (truncate then), set mask")
DROP_EQUAL = option("drop_equal")
GROUP_OF_ONE = value("algorithm.group_size", 1, undo="set algorithm.group_size to 2 or more")
REMAX = value(NAME, "remax", undo="set reinforce_pp")
SFT = value(NAME, *IMITATING, undo="use another algorithm, such as grpo")
PAIRWISE = value(NAME, *COMPARING_TWO, undo="use another algorithm, such as grpo")
JUDGE = value(NAME, *JUDGING, undo="use another algorithm, such as grpo")
HEADLESS = value(NAME, *JUDGING, undo="set trainer.backend: fsdp")
OF_PAIRS = value(NAME, JUDGING[0], undo="")
OF_STEPS = value(NAME, *STEPWISE, undo="")
NOT_SFT = unlike(NAME, *IMITATING, undo=f"set algorithm.name: {IMITATING[0]}")
ASKED_LOSSES = value(NAME, SESSION, undo="use another algorithm, such as grpo")
NOT_ASKED_LOSSES = unlike(NAME, SESSION, undo="leave {it} out")
MORE_PROMPTS = unlike("algorithm.prompts_per_step", 1, undo="leave {it} out")
OTHER_MODES = unlike(MODE, "collocated", "disaggregated", undo="leave {it} out")
SESSION_KEY = key("session", "remove session")
NOT_PAIRWISE = unlike(NAME, *COMPARING_TWO, undo=f"set algorithm.name: {COMPARING_TWO[0]}")
NOT_JUDGE = unlike(NAME, *JUDGING, undo=f"set algorithm.name: {JUDGING[0]}")
ONE_ANSWER = unlike("algorithm.group_size", 1, undo="leave {it} out")
NOT_PPO = unlike(NAME, "ppo", undo="set algorithm.name: ppo")
TWO_ANSWERS = unlike("algorithm.group_size", 2, undo="leave {it} out")
GIVEN_SCORERS = when("`reward.scorers`", "reward.scorers", lambda spec: spec.reward.scorers)
IN_TURNS = unlike(MODE, "collocated", undo="leave {it} out")
DISTILL = value(NAME, "distill", undo="")
TOP_WORDS = option("top_k")
NO_WORDS = missing("algorithm.options.top_k", "set algorithm.options.top_k")
DIRECTION = option("direction")
REFERENCE = key("trainer.reference")
NO_REFERENCE = missing("trainer.reference", "give the teacher's path")
NO_KL = when("no KL term", NAME, _idle_reference, "set algorithm.options.kl_loss_coef above 0")
WARMUP = key("trainer.warmup.steps")
NO_WARMUP = also(
    missing("trainer.warmup.steps", "set trainer.warmup.steps"),
    missing("algorithm.options.demonstrations_share", "set algorithm.options.demonstrations_share"),
)
DEMONSTRATIONS = key("trainer.warmup.demonstrations")
COLLECTED = "a directory that `headrace demonstrations collect` writes"
UNSHOWN = missing("trainer.warmup.demonstrations", f"give trainer.warmup.demonstrations, {COLLECTED}")
UNSHOWN_ROBOT = also(UNSHOWN, ROBOT)

DRAFT = key("trainer.draft", "remove trainer.draft")

# Adapters
NOT_MERGED = unlike("weights.lora", "merged", undo="set weights.lora: merged")
LORA = also(key("trainer.lora", "remove trainer.lora"), NOT_ROBOT, said="`trainer.lora`")
QUANTIZED_BASE = when(
    "`trainer.lora.quantization`",
    "trainer.lora.quantization",
    lambda spec: spec.trainer.lora is not None and spec.trainer.lora.quantization,
)
NO_LORA = missing("trainer.lora", "give trainer.lora")
ROBOT_LORA = also(key("trainer.lora", ""), ROBOT)
OTHER_BASES = when(
    "policies with another model, or without `trainer.lora`",
    "policies",
    _bases_differ,
    "give all policies one model and trainer.lora",
)
ADAPTERS_ALONE = value("weights.lora", "adapter", undo="set weights.lora: auto")
MERGED = value("weights.lora", "merged", undo="set weights.lora: auto")
ENABLE_LORA = value("rollout.enable_lora", True, undo="leave {it} out: adapters are merged then")
BY_RANKS = value("weights.publish", "ranks", undo="set weights.publish: leader")
ONE_BASE = when("", "policies", lambda spec: not _bases_differ(spec))
PUBLISHED_ALONE = also(NOT_MERGED, LORA, ONE_BASE, said="adapters that are published alone")
OWN_DEVICES = Feature(
    "`policies.NAME.own_devices`",
    lambda run: [
        f"policies.{name}.own_devices" for name, each in run.spec.policies.items() if each.own_devices
    ],
)

# Engines, as their plug-ins register what they can do
UNSAME = lacking("rollout.engine", "deterministic", "an engine with kernels that the trainer has not")
NO_ADAPTERS = lacking("rollout.engine", "lora", "an engine that computes with no adapters")
NO_SWAP = lacking("rollout.engine", "inflight_update", "an engine that installs between answers only")
NO_ROUTES = lacking("rollout.engine", "routed_experts", "an engine that does not tell which experts it used")
NO_LIKELIEST = lacking("rollout.engine", "likeliest", "an engine that does not tell the likeliest words")
WARMER = unlike("sampling.temperature", 1, undo="set sampling.temperature: 1")
NO_IMAGES = lacking("rollout.engine", "images", "an engine that takes no images")
TOP_P_FIRST = lacking("rollout.engine", "top_p_after_others", "an engine that counts top-p over all tokens")
ANSWER_ONLY = lacking("rollout.engine", "penalty_counts_prompt", "an engine that penalises no prompt")
READS_NO_HEAD = lacking("rollout.engine", "learned_drafts", "an engine that reads no head that learns")
ON_POLICY = lacking("algorithm", "off_policy", "an algorithm that is right on policy only")
DRAFTS = when(
    f"`{ENGINE}.speculative`",
    f"{ENGINE}.speculative",
    lambda spec: drafts(spec.rollout.engine_options),
    f"leave {ENGINE}.speculative out",
)
QUANTIZED = Feature("a quantised engine", _quantized, "leave {it} out")
EXACT = value("model.dtype", "float32", undo="set model.dtype: bfloat16, or leave {it} out")
EXPERTS_ONLY = value(f"{ENGINE}.quantization", "int8", undo="set fp8, or leave {it} out")
DIVIDES_EXPERTS = key(f"{ENGINE}.engine_args.enable_expert_parallel", "leave {it} out")
PLAIN = resolved("a model without experts", "model.path", lambda run: run.plain)
OF_EVALUATION = "an evaluation's `sampling."
TRUNCATES = Feature(f"{OF_EVALUATION}top_p`, `top_k` or `min_p`", _truncated, "leave {it} out")
TOP_P_AND_OTHERS = resolved(
    f"{OF_EVALUATION}top_p` with `top_k` or `min_p`",
    "sampling.top_p",
    lambda run: run.asked and run.asked.top_p < 1 and (run.asked.top_k or run.asked.min_p),
    "set top_p: 1, or top_k: 0 and min_p: 0",
)
PENALTY = resolved(
    f"{OF_EVALUATION}repetition_penalty`",
    "sampling.repetition_penalty",
    lambda run: run.asked and run.asked.repetition_penalty != 1,
    "set 1",
)
IMAGES = resolved("images", "data", lambda run: run.images)
IN_DATA = resolved("images in the data", "data", lambda run: run.in_data)
BLIND = Feature(
    "a local model of a family whose images are not read",
    lambda run: run.blind,
    "name a model of {readers}",
)

# Data and evaluation
CURRICULUM = key("data.curriculum")
SYSTEM = key("data.prompt.system")
NO_CHAT = value("data.prompt.chat", False, undo="set data.prompt.chat: true")
OWN_SOURCE = unlike("data.source", EPISODES)
HELDOUT, EVALUATION_DATA = key("data.heldout"), key("evaluation.data")
NO_HELDOUT = missing("data.heldout", "set data.heldout above 0")
NO_DATA = missing("evaluation.data", "")
NOTHING_ASKED = also(missing("data.heldout", "set data.heldout above 0, or give evaluation.data"), NO_DATA)
EVERY = key("evaluation.every", "set evaluation.every: 0")
BASELINE = key("evaluation.baseline_prefill", "set evaluation.baseline_prefill: null")
SAMPLES = above("evaluation.samples", 1, "set evaluation.samples: 1")
GREEDY = value("evaluation.greedy", True, undo="set evaluation.greedy: false")
