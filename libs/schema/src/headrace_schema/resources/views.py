"""What the HTTP API shows: resources as JSON, which the coordinator's presenters make of its state."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from headrace_schema.resources.evaluations import EvaluationView, RunHead, SuiteEvaluationView
from headrace_schema.resources.resource import Resource


class PolicyView(Resource):
    """A policy version."""

    number: int
    parent: int
    ordinal: int
    digest: str


class EndpointView(Resource):
    """Where clients of an online run speak with its policy, as with any OpenAI-compatible server."""

    base_url: str = Field(
        description="of the HTTP API: OPENAI_BASE_URL; empty: no rollout has the run open now"
    )
    api_key: str = Field(description="what clients show: OPENAI_API_KEY")


class StepView(Resource):
    """One committed step."""

    step: int
    version: int
    wall_s: float
    reward_mean: float | None = Field(
        description="of the answers that were trained; null: none has a verdict"
    )
    tokens: int
    tokens_per_s: float | None = Field(description="null: the step took no time that could be measured")
    stage_s: dict[str, float] = Field(
        description="seconds by stage: generate, score, learn, sync, switch, protocol; with max_staleness above 0 "
        "generate is the time in which devices had answers to make, in the mean over them"
    )
    devices: dict[str, dict[str, float]] = Field(description="seconds by device and stage")
    trained: int
    dropped: int
    filtered: int = Field(
        default=0, description="dropped slots whose group the algorithm does not keep: FILTERED"
    )
    refilled: int = Field(default=0, description="groups that the step took in place of dropped ones")
    max_staleness: int | None = Field(description="null: no token was trained")
    figures: dict[str, float] = Field(
        description="the trainer's figures: loss, grad_norm, learning_rate, …; null: no finite number",
        json_schema_extra={"additionalProperties": {"anyOf": [{"type": "number"}, {"type": "null"}]}},
    )


class CountsView(Resource):
    """Recomputed from certificates and the slot ledger, not from counters."""

    trained: int
    dropped: int
    filtered: int = Field(
        default=0, description="dropped slots whose group the algorithm does not keep: FILTERED"
    )
    duplicates: int
    max_staleness: int | None = Field(description="null: nothing was trained")
    frontier: int = Field(description="slots below it are terminal exactly once")


class RunPlanView(Resource):
    """How a run uses its devices, and how its last step compares with what was predicted."""

    mode: str = Field(description="collocated, disaggregated or hybrid")
    flow: str = Field(
        default="",
        description="side by side: pipelined or sequential; empty: collocated, or a run that shares",
    )
    memory: str = Field(
        default="", description="of a side without devices: offloaded or resident; empty: none is without"
    )
    chosen_by: str = Field(description="spec, or auto: by the run's own steps")
    from_step: int = Field(description="the first step that it holds for, counted from 1")
    rollout: list[str] = Field(description="devices that generate; empty: as the mode divides the run's")
    trainer: list[str] = Field(description="devices that learn; empty: as the mode divides the run's")
    reason: str
    predicted_s: dict[str, float] = Field(
        description="seconds of generate, learn and the whole step; empty: not predicted"
    )
    measured_s: dict[str, float] = Field(description="the same of the last step; empty: there is none")
    alternatives: dict[str, float] = Field(description="other placements and the seconds of a step with them")
    proposal: str = Field(description="what would be faster now, where the spec says replan: propose")


class RunBrief(RunHead):
    """What a list of runs and a run itself show."""

    priority: int = Field(default=0, description="runs of a higher priority come first")
    step: int = Field(
        description="committed steps of the live lineage; of an evaluation: answers that are scored"
    )
    steps: int
    forked_from: str = Field(
        default="", description="id of the run from whose checkpoint it continues; empty: none"
    )
    tags: list[str] = Field(default=[], description="words that people gave it")
    note: str = Field(default="", description="what people say of it")


class UploadsView(Resource):
    """What the run's store has of its checkpoints."""

    name: str = Field(description="the newest checkpoint that is whole there; empty: none")
    step: int = Field(description="steps in it")
    behind_steps: int = Field(description="steps between it and the newest checkpoint on disk")
    seconds: float = Field(description="how long its upload took")
    size_bytes: int
    skipped: int = Field(description="checkpoints not uploaded, as uploads are slower than checkpoints")
    problem: str = Field(description="why the last upload failed; empty once one succeeds")


class RunView(RunBrief):
    """One run."""

    name: str = Field(description="resource name, runs/{id}")
    intent: str = Field(default="RUN", description="what is wanted of it: RUN, PAUSE, PAUSE_NOW or CANCEL")
    ranks: int = Field(default=0, description="ranks of its trainer group; 0 for a run that trains nothing")
    wanted_ranks: int = Field(
        default=0, description="ranks that it should have from its next step on; 0: as it has"
    )
    ranks_reason: str = Field(
        default="",
        description="why its trainer group changed last, or will after this step; empty: it never did",
    )
    warnings: list[str] = Field(
        default_factory=list,
        description="what makes it learn nothing, and where to look; empty: nothing known",
    )
    stalled: bool = Field(
        default=False,
        description="the step in hand stands still for many times as long as it should; see warnings",
    )
    policy: PolicyView | None
    warmup_steps: int
    layout: str = Field(
        default="", description="how the trainers hold the model, what it needs of a rank, and why"
    )
    baseline_prefill: EvaluationView | None
    evaluations: list[EvaluationView]
    last_step: StepView | None
    counts: CountsView
    recoveries: int
    engine_restarts: int = Field(
        default=0, description="how often rollouts had to start processes of vLLM or SGLang again"
    )
    run_directory: str
    export_path: str
    first_step: int = Field(
        default=0, description="steps below it are in the checkpoint that it was forked from"
    )
    pipeline: list[str] = Field(
        default_factory=list,
        description="ids of the runs before it, each of which begins with the export of the one before (`after`), "
        "itself, and those that come after it; empty for a run alone",
    )
    uploads: UploadsView | None = Field(
        default=None, description="what its store has of its checkpoints; null for a run without `store`"
    )
    suite: SuiteEvaluationView | None = Field(
        default=None, description="what it evaluates; null for a run that trains"
    )
    plan: RunPlanView | None = Field(
        default=None, description="how it uses its devices; null for a run that trains nothing"
    )
    spec: dict[str, Any] = Field(
        description="what was submitted, with every default; {} in lists unless asked for"
    )


class RunListView(Resource):
    """A page of runs, newest first."""

    runs: list[RunView]
    next_page_token: str = ""


class EventView(Resource):
    """One event of a run; `id` is the SSE id."""

    id: int
    type: str
    time: float
    run: str
    data: dict[str, Any]


class CertificateView(Resource):
    """Attests one update: made from the coordinator's and the trainer's counts."""

    version: PolicyView
    step: int = Field(description="the run's step that it ends, counted from 1")
    attempt: int
    live: bool = Field(description="false once a rewind abandoned the version")
    trained: list[tuple[int, int, int]] = Field(description="(prompt ordinal, sample index, attempt)")
    dropped: list[tuple[int, int, str]] = Field(description="(prompt ordinal, sample index, reason)")
    set_digest: str
    tokens: int
    tokens_by_version: dict[int, int]
    max_staleness: int | None = Field(description="null: no token was trained")
    mean_staleness: float | None = Field(
        default=None, description="steps that a token lags behind the base, in the mean; null: as above"
    )
    log_prob_mismatch_mean: float | None = Field(
        description="mean |engine − trainer| log-prob in nats; null when no token was compared"
    )
    log_prob_compared_tokens: int = Field(default=0, description="tokens that the mismatch is over")
    log_prob_mismatch_kl: float | None = Field(
        default=None,
        description="estimate of KL(engine || trainer) in nats a token; null when no token was compared",
    )
    log_prob_mismatch_bits: int | None = Field(
        default=None,
        description="with deterministic: true the bits in which the engine's log-probs differ from the trainer's: 0, "
        "as the run fails at the first; null without it, and where no token was compared",
    )
    drop_rate_by_length: dict[str, float] = Field(
        description="share dropped, FILTERED ones apart, by bucket of answer length in tokens"
    )
    drop_rate_by_pass_rate: dict[str, float] = Field(
        description="share dropped, FILTERED ones apart, by bucket of the prompt's pass rate"
    )
    refilled: int = Field(default=0, description="groups that the step took in place of dropped ones")
    helped: dict[str, list[int]] = Field(
        default_factory=dict,
        description="prompt ordinals of the groups whose gradient a helper contributed, by its name; the trainer "
        "group made all others",
    )
    given: int = Field(default=0, description="trained answers that the data gave: no version sampled them")
    scored_by_stage: dict[str, int] = Field(
        default={}, description="trained answers that each of several reward stages scored; else empty"
    )
    reward_by_stage: dict[str, float] = Field(
        default={}, description="mean reward of these answers from each of these stages"
    )


class CertificateListView(Resource):
    """A page of certificates, oldest first."""

    certificates: list[CertificateView]
    next_page_token: str = ""


class CallView(Resource):
    """A tool that the policy calls in a turn."""

    name: str
    arguments_json: str = ""
    problem: str = Field(
        default="", description="why it is no call, as the policy wrote it; empty: it is one"
    )


class MessageView(Resource):
    """What one side of a conversation said."""

    role: str
    content: str
    tokens: int | None = Field(
        default=None,
        description="tokens of a turn that the policy sampled; null for what it was given, which carries no loss",
    )
    reward: float | None = Field(
        default=None, description="reward of the policy's turn; those of all turns add up to the trajectory's"
    )
    calls: list[CallView] = Field(
        default=[], description="of the policy's turn, where the spec says their form"
    )
    party: str = Field(
        default="", description="with several roles: whose turn it is, or who is told it; empty with one"
    )
    branch: int | None = Field(
        default=None, description="of the policy's turn: which branch it belongs to, from 0, as in `read`"
    )
    images: list[str] = Field(
        default=[],
        description="small copies of its first four images, as data URLs, and of the first sixteen of a conversation",
    )


class TrajectoryView(Resource):
    """One settled trajectory as text."""

    step: int
    version: int
    prompt_ordinal: int
    sample_index: int
    attempt: int
    prompt: str
    completion: str
    reference: str
    reward: float
    parts: dict[str, float]
    finish_reason: str
    tokens: int
    versions: list[tuple[int, int]] = Field(
        default=[], description="(number of a version, tokens that it sampled), in order"
    )
    log_probs: list[float | None] = Field(
        default=[], description="the engine's log-prob of each sampled token in nats, of the first 1024"
    )
    new_log_probs: list[float | None] = Field(
        default=[],
        description="the same tokens' log-probs under the version that the step made, where tracking.ratios is set",
    )
    text_bytes: list[int] = Field(
        default=[],
        description="bytes (UTF-8) of `completion`, in a conversation of the policy's turns in `messages`, that each "
        "of the first 1024 sampled tokens is; empty where its tokenizer does not say",
    )
    advantage: float | None = Field(
        default=None,
        description="mean advantage over its trained tokens; null where the trainer did not report it",
    )
    detail: str = Field(default="", description="what made a scorer fail, in an evaluation; empty: nothing")
    stage_rewards: dict[str, float] = Field(
        default={},
        description="what each of several reward stages gave it; a stage that did not see it is absent",
    )
    messages: list[MessageView] = Field(
        default=[], description="all that was said in a conversation; empty of an answer"
    )
    masked: bool = Field(default=False, description="it counts in baselines, and its tokens carry no loss")
    images: list[str] = Field(
        default=[], description="small copies of the prompt's first four images, as data URLs"
    )
    figures: dict[str, float] = Field(
        default={}, description="what an agent says that it was, such as turns, tokens and errors, by name"
    )
    read: list[list[str]] = Field(
        default=[],
        description="what the model read, with its special tokens: of each branch what was given and what was "
        "sampled, in turns; of an answer its prompt alone. Empty where nobody noted it",
    )


class TrajectoryListView(Resource):
    """A page of trajectories."""

    trajectories: list[TrajectoryView]
    next_page_token: str = ""


class CheckpointView(Resource):
    """One durable checkpoint."""

    name: str
    version: PolicyView
    step: int = Field(default=0, description="steps in it; a run that continues from it makes the next one")
    size_bytes: int
    remote: str = Field(default="", description="where a store has it whole; empty: nowhere, or not yet")


class CheckpointListView(Resource):
    """Checkpoints, newest first."""

    checkpoints: list[CheckpointView]
    next_page_token: str = ""


class RecordingView(Resource):
    """What was said to the services in one step, as a file."""

    name: str
    step: int
    reason: str = Field(description="why it was kept")
    size_bytes: int
    kept_at: float = Field(description="seconds since the epoch")
    checkpoint: str = Field(
        default="", description="that the trainer's calls begin with; empty: a Restore among them"
    )
    incomplete: str = Field(default="", description="what is missing; empty where nothing is")


class RecordingListView(Resource):
    """Recordings of a run, newest first."""

    recordings: list[RecordingView]
    wanted: list[int] = Field(default=[], description="steps that were asked for and are not made yet")


class DeletedView(Resource):
    """A run that there is no more."""

    id: str


class LinkView(Resource):
    """A one-time link to the dashboard."""

    path: str = Field(description="path on this coordinator, good once")
    expires_in_s: float


class KeyProblemView(Resource):
    """One thing that is wrong with a request."""

    key: str = Field(description="path of the key, such as algorithm.group_size")
    problem: str
    fix: str = Field(description="what to write instead; names the nearest valid value")


class ErrorView(Resource):
    """A refused request."""

    reason: str
    message: str
    problems: list[KeyProblemView] = Field(default_factory=list)
