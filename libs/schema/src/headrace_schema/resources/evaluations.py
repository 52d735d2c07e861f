"""What the HTTP API shows of evaluations of suites: progress, figures with their intervals, comparisons."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from headrace_schema.resources.resource import Resource

ENDED_STATES = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})


class RunHead(Resource):
    """How far a run is: what a list, a run and an evaluation all show."""

    id: str
    state: str
    reason: str = Field(description="why it is in this state, for people")
    place: int | None = Field(
        default=None, description="place in the queue, from 1; null for a run that is not waiting"
    )
    created_at: float = Field(description="seconds since the epoch")
    started_at: float | None
    finished_at: float | None
    waiting_for: list[str] = Field(description="what it waits for now, and who holds it")
    doing: list[str] = Field(
        default=[], description="what it works on beside its steps for 2 s or longer, such as loading a model"
    )
    owner: str = Field(default="admin", description="who submitted it")
    team: str = Field(default="", description="the owner's team; empty: none")
    visibility: str = Field(default="private", description="who sees it: private, team or fleet")

    @property
    def ended(self) -> bool:
        """Whether it is SUCCEEDED, FAILED or CANCELLED."""
        return self.state in ENDED_STATES


class ModeView(Resource):
    """One figure of an evaluation."""

    mode: str = Field(description="greedy, avg@K, pass@K or maj@K")
    score: float
    low: float | None = Field(default=None, description="95% interval over items; null: fewer than two items")
    high: float | None = None


class TaskView(Resource):
    """The first figure of one task of a suite that has several kinds of items."""

    task: str
    variant: str = Field(
        default="", description="of the task, by the spec's environment.variants; empty: none"
    )
    items: int
    score: float
    low: float | None = Field(default=None, description="95% interval over items; null: fewer than two items")
    high: float | None = None


class EpisodeFigures(Resource):
    """What is known of an evaluation's episodes beside its score; all empty where there are none."""

    measure: str = Field(
        default="",
        description="what of an episode the score is: success, success_at_end, return or steps; empty: scorers' own",
    )
    episodes: dict[str, float] = Field(
        default_factory=dict,
        description="mean return and steps; where the environment says success, the shares that succeeded at any "
        "action (success) and at the last (success_at_end; not where a success ends an episode)",
    )
    note: str = Field(default="", description="what a reader has to know of the figures, in words")


class EvaluationView(EpisodeFigures):
    """One evaluation of held-out items."""

    kind: str = Field(
        description="heldout, a name of evaluation.data, or baseline_prefill: the untrained model with its answer begun"
    )
    step: int = Field(description="ordinal of the evaluated version")
    version: int
    score: float = Field(description="mean weighted score over all answers")
    parts: dict[str, float] = Field(description="mean of each scorer before weighting")
    answers: int = Field(description="answers that are scored, of which all figures are")
    unanswered: int = Field(
        default=0,
        description="answers that an environment, an engine or a scorer failed at; no figure has them",
    )
    failure: str = Field(default="", description="why the first of them is missing")
    score_low: float | None = Field(
        default=None, description="95% interval of the score over prompts; none: one prompt"
    )
    score_high: float | None = None
    pass_at: dict[str, float] = Field(
        default_factory=dict,
        description="k → share of prompts of which one in k answers passes (unbiased estimate)",
    )
    examples: list[dict[str, Any]] = Field(description="a few {prompt, completion, reference, reward}")


class SuiteResultView(EpisodeFigures):
    """What an evaluation found."""

    modes: list[ModeView]
    tasks: list[TaskView] = Field(
        default_factory=list, description="of episodes: the first mode's figure of each task"
    )
    parts: dict[str, float] = Field(description="mean of each scorer before weighting")
    answers: int = Field(description="answers that are scored, of which all figures are")
    truncated: float = Field(
        description="share of answers that the limit of tokens, or of an episode's steps, cut"
    )
    unanswered: int = Field(
        default=0,
        description="answers that an environment, an engine or a scorer failed at; no figure has them",
    )
    failure: str = Field(default="", description="why the first of them is missing")
    tokens_mean: float = Field(description="tokens of an answer, actions of an episode")


class SuiteEvaluationView(Resource):
    """What an evaluation asks of what, how far it is, and what it found."""

    suite: str
    model: str = Field(description="path or Hugging Face id")
    checkpoint_run: str = Field(
        default="", description="run of the checkpoint; empty: the model's own weights"
    )
    checkpoint_step: int | None = None
    weights_digest: str = Field(default="", description="of the weights that answered; empty: not read yet")
    data_digest: str = Field(default="", description="of the suite's items; empty: not opened yet")
    items: int
    samples: int
    answers: int = Field(description="answers that are scored")
    answers_total: int
    versions: dict[str, str] = Field(
        default_factory=dict, description="versions of what asked, by distribution"
    )
    result: SuiteResultView | None = Field(default=None, description="null until it has succeeded")
    spec: dict[str, Any]


class EvaluationRunView(SuiteEvaluationView, RunHead):
    """One evaluation. It is a run too: `/v1/runs/{id}` has its events and transcripts, pauses and cancels it."""

    name: str = Field(description="resource name, evaluations/{id}")
    recoveries: int


class EvaluationRunListView(Resource):
    """A page of evaluations, newest first."""

    evaluations: list[EvaluationRunView]
    next_page_token: str = ""


class VideoView(Resource):
    """A video of an episode of an evaluation or of a run's training."""

    name: str = Field(description="of the file; `…/videos/{name}` is the file itself, an MP4")
    step: int | None = Field(default=None, description="of a run's training")
    item: int = Field(description="as `prompt_ordinal` of its transcript")
    sample: int
    success: bool
    size_bytes: int


class VideoListView(Resource):
    """The videos of an evaluation or a run, by step and item."""

    videos: list[VideoView]


class EpisodeView(Resource):
    """What a policy did in a recorded episode, step by step; action k leads from frame k of its video to the next."""

    actions: list[list[float]] = Field(description="as executed, in the environment's units")
    rewards: list[float]
    successes: list[bool]
    chunk_starts: list[int] = Field(
        description="steps at which the policy read an observation and drew actions"
    )
    values: list[float] | None = Field(
        description="the critic's, at each of these steps; null without a critic"
    )
    truncated: bool = Field(description="cut by the limit of steps")


class CameraView(Resource):
    """A camera of a demonstration."""

    name: str
    film: bool = Field(description="one film, in which the episode begins at from_s; false: a picture a step")
    from_s: float = 0.0


class DemonstrationView(Resource):
    """An episode that a robot policy imitates."""

    episode: int = Field(description="its place in the data set, counted from 0")
    task: str
    steps: int
    cameras: list[CameraView]


class DemonstrationListView(Resource):
    """A page of the demonstrations of a run."""

    directory: str
    fps: float = Field(description="steps a second that the data set states")
    total: int = Field(description="episodes on all pages")
    demonstrations: list[DemonstrationView]
    next_page_token: str = ""


class DifferenceView(Resource):
    """One figure of two evaluations, compared item by item."""

    mode: str
    first: float
    second: float
    difference: float = Field(description="second minus first")
    low: float | None = Field(description="95% interval of the difference: paired bootstrap over items")
    high: float | None
    wins: int = Field(description="items on which the second one is better")
    losses: int
    ties: int
    p_value: float | None = Field(
        default=None, description="exact McNemar test, two-sided; null where an item's figure is not 0 or 1"
    )


class ComparisonView(Resource):
    """Two evaluations of the same items."""

    first: str
    second: str
    items: int
    differences: list[DifferenceView]
