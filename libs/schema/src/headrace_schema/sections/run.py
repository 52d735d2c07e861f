"""All sections of a run spec together, each valid by itself. Knows no rule of their combinations."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from headrace_schema.sections.agent import AgentSection
from headrace_schema.sections.base import FEW, Count, Section, Seed
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_schema.sections.generating import (
    DataSection,
    EvaluationSection,
    ModelSection,
    RolloutSection,
    SamplingSection,
    engines_apart,
)
from headrace_schema.sections.learning import (
    AlgorithmSection,
    CheckpointSection,
    OptimizerSection,
    TrainerSection,
)
from headrace_schema.sections.policies import PolicyName, PolicySection
from headrace_schema.sections.running import (
    FromCheckpointSection,
    LimitsSection,
    PlacementSection,
    RecordingSection,
    SchedulingSection,
    SessionSection,
    StoreSection,
)
from headrace_schema.sections.scoring import RewardSection
from headrace_schema.sections.tracking import TrackingSection
from headrace_schema.sections.weights import WeightsSection
from headrace_schema.workflow import (
    BUILT_IN,
    COMPARING,
    CONVERSATIONS,
    DISTILL,
    SESSION,
    GraphSection,
    WorkflowChoice,
    acts_in_environments,
    generates,
    has_given_answers,
    has_scorers,
    is_scored,
    trains_robots,
)


class RunSections(Section):
    """One run."""

    # An embodied run's data and reward follow from its environment: the description must not ask for them.
    model_config = ConfigDict(json_schema_extra={"required": ["model"]})

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")] = Field(
        default="run", description="begins the run's id"
    )
    workflow: WorkflowChoice = Field(
        default="reasoning",
        description="reasoning (generate → score → learn), embodied (a robot policy acts in simulators), agentic (a "
        "language model speaks with environments and tools), supervised (imitates the answers of the data, "
        "or demonstrations), preference "
        "(compares two answers of the data), reward_model (learns to judge answers of the data), session (a loop of "
        "one's own asks for each step and sample), or stages and edges of one's own",
    )
    steps: Count = Field(default=10, description="policy updates")
    seed: Seed = Field(default=0, description="of the order of items and of all sampling")
    deterministic: bool = Field(
        default=False,
        description="engine and trainer compute the same log-probs in every bit, whatever was batched with what: the "
        "run fails at the first that differs. Same seed, same final weights, also over crashes; slower. Of an embodied "
        "run the weights alone",
    )
    export: bool = Field(default=True, description="write the final weights as a Hugging Face directory")
    model: ModelSection
    environment: EnvironmentSection | None = Field(
        default=None, description="what an embodied run's policy acts in, or an agentic run's speaks with"
    )
    agent: AgentSection | None = Field(
        default=None,
        description="of an agentic run: a program that speaks with the model through an OpenAI-compatible endpoint, in "
        "place of an environment",
    )
    session: SessionSection | None = Field(default=None, description="of a session run: when it pauses")
    policies: dict[PolicyName, PolicySection] = Field(
        default_factory=dict,
        max_length=FEW,
        description="of an agentic run whose environment has roles: policies that learn beside the run's own one, by "
        "name; environment.roles says who plays which role",
    )
    data: DataSection = Field(
        description="where prompts come from; needed but for an embodied, agentic or session run"
    )
    sampling: SamplingSection = SamplingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    optimizer: OptimizerSection = OptimizerSection()
    trainer: TrainerSection = TrainerSection()
    rollout: RolloutSection = RolloutSection()
    weights: WeightsSection = WeightsSection()
    reward: RewardSection = Field(
        description="what judges an answer; needed but for embodied, agentic and session runs, and those whose answers "
        "the data gives"
    )
    placement: PlacementSection = PlacementSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    recording: RecordingSection = RecordingSection()
    store: StoreSection | None = Field(
        default=None,
        description="where copies of checkpoints, the export, recordings and videos go; default: nowhere",
    )
    scheduling: SchedulingSection = SchedulingSection()
    limits: LimitsSection = LimitsSection()
    from_checkpoint: FromCheckpointSection | None = Field(
        default=None,
        description="continue from a checkpoint of another run; default: from the model's weights",
    )

    after: str | None = Field(
        default=None,
        description="a run, by id or by the newest one of a name: this one begins with its export when it succeeds, "
        "and is cancelled when it ends otherwise; model.path is left out then",
    )

    @property
    def kind(self) -> str:
        """The workflow's name, for people."""
        return self.workflow if isinstance(self.workflow, str) else "a graph of stages"

    @property
    def acts_in_environments(self) -> bool:
        """Whether the policy is a robot's: it acts in environments and learns from episodes."""
        return acts_in_environments(self.workflow)

    @property
    def trains_robots(self) -> bool:
        """Whether the policy is a robot's, also where it imitates demonstrations alone."""
        return trains_robots(self.workflow, self.data.source)

    @property
    def has_given_answers(self) -> bool:
        """Whether the data gives the answers: no rollout and no scorer takes part in its steps."""
        return has_given_answers(self.workflow)

    @property
    def teacher_top(self) -> int:
        """How many words of a teacher beside the engine are learned from in each token's place; 0: there is none."""
        found = self.algorithm.options.get("top_k") if self.algorithm.name == DISTILL else None
        return found if type(found) is int else 0

    @property
    def generates(self) -> bool:
        """Whether a rollout takes part, in its steps or in its evaluations alone."""
        return generates(self.workflow, self.evaluation.data)

    @property
    def is_scored(self) -> bool:
        """Whether scorers judge answers, in its steps or in its evaluations alone."""
        return is_scored(self.workflow, self.evaluation.data)

    @property
    def is_session(self) -> bool:
        """Whether a loop of the user's own asks for each step."""
        return self.workflow == SESSION

    @property
    def has_scorers(self) -> bool:
        """Whether scorers judge the answers of its steps."""
        return has_scorers(self.workflow)

    @property
    def speaks_with_environments(self) -> bool:
        """Whether answers are conversations, which environments, agents or clients lead."""
        return self.workflow == CONVERSATIONS

    @property
    def is_online(self) -> bool:
        """Whether clients from outside lead the conversations."""
        return self.agent is not None and self.agent.online is not None

    @property
    def played(self) -> dict[str, str]:
        """Which of `policies` plays a role, by role; the run's own policy plays those that are not there."""
        roles = self.environment.roles if self.environment is not None else {}
        return {name: role.policy for name, role in roles.items() if role.policy}

    @property
    def algorithms(self) -> dict[str, AlgorithmSection]:
        """By which the policies learn, by their keys: the run's own, and those that others of `policies` name."""
        named = {name: policy.algorithm for name, policy in self.policies.items() if policy.algorithm}
        return {"algorithm": self.algorithm} | {
            f"policies.{name}.algorithm": self.algorithm.model_copy(
                update={"name": own.name, "options": own.options}
            )
            for name, own in named.items()
        }

    @property
    def engines(self) -> int:
        """Models of a rollout instance that have devices of their own: the policy, and those with `own_devices`."""
        return 1 + engines_apart(self.model_dump(include={"environment": {"roles"}, "policies": True}))

    @property
    def slots_per_step(self) -> int:
        """B: slots of one step."""
        return self.algorithm.group_size * self.algorithm.prompts_per_step

    @property
    def install(self) -> str:
        """How a rollout that makes answers takes a new version: `rollout.install`, or what fits the run."""
        return self.rollout.install or ("drain" if self.environment is not None else "in_flight")

    @property
    def graph(self) -> GraphSection:
        """The workflow with its stages and edges, whichever way it was declared."""
        if isinstance(self.workflow, GraphSection):
            return self.workflow
        return (COMPARING if "group" in self.reward.give else BUILT_IN)[self.workflow]

    @property
    def tool_calls(self) -> str:
        """The form in which the policy of a conversation calls tools; empty where the spec does not say."""
        if self.agent is not None:
            return self.agent.tool_calls
        if self.environment is None:
            return ""
        default = "hermes" if "tools" in self.environment.tasks else ""
        return str(self.environment.options.get("parser", default))

    @property
    def main_stage(self) -> str:
        """The reward stage whose scorers are `reward.scorers`."""
        return next((name for name in self.graph.of("reward") if name not in self.reward.stages), "score")
