"""The workflow as data: stages of the services, and what flows between them. Knows no cost and no device."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from headrace_schema.sections.base import FEW, Section

Service = Literal["rollout", "reward", "trainer", "simulator"]
Granularity = Literal["turn", "trajectory", "group", "batch"]
StageName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]


class GraphStage(Section):
    """Work of one service in every step.

    Its scorers are those of `reward.stages` under the stage's name; one reward stage has none there and takes
    `reward.scorers`.
    """

    service: Service = Field(
        description="rollout answers, reward scores, trainer learns; simulator: of embodied and agentic alone"
    )
    combine: Literal["add", "replace"] = Field(
        default="add",
        description="reward: add its reward to what earlier stages gave, or let it stand in their place",
    )


class GraphEdge(Section):
    """What one stage hands to another: answers to a reward stage, whole groups with their rewards to the trainer."""

    source: str = Field(description="stage that produces")
    target: str = Field(description="stage that receives")
    granularity: Granularity | None = Field(
        default=None,
        description="smallest piece handed over; default: group into the trainer, else trajectory",
    )
    at_least: float | None = Field(
        default=None,
        description="only answers to which the source, a reward stage, gave at least this reward go on to the target",
    )


class GraphSection(Section):
    """Stages joined by edges: one rollout, any number of reward stages, one trainer."""

    stages: dict[StageName, GraphStage] = Field(
        min_length=1, max_length=FEW, description="stage: what it does"
    )
    edges: list[GraphEdge] = Field(max_length=4 * FEW, description="what flows between the stages")

    def of(self, service: str) -> list[str]:
        """Names of a service's stages, in the order of declaration."""
        return [name for name, stage in self.stages.items() if stage.service == service]

    def into(self, stage: str) -> list[GraphEdge]:
        """The edges that end in a stage."""
        return [edge for edge in self.edges if edge.target == stage]

    def granularity(self, edge: GraphEdge) -> Granularity:
        """The smallest piece that an edge of the graph hands over."""
        learns = self.stages[edge.target].service == "trainer"
        return edge.granularity or ("group" if learns else "trajectory")

    def with_whole_groups(self) -> GraphSection:
        """The same, where reward stages wait for all answers to a prompt."""
        stages = self.of("reward")
        edges = [
            edge.model_copy(update={"granularity": "group"}) if edge.target in stages else edge
            for edge in self.edges
        ]
        return self.model_copy(update={"edges": edges})

    @property
    def whole_groups(self) -> frozenset[str]:
        """Reward stages that wait for all answers to a prompt."""
        into = (edge for edge in self.edges if self.granularity(edge) == "group")
        return frozenset(edge.target for edge in into if edge.target in self.of("reward"))

    @property
    def whole_batch(self) -> bool:
        """Whether learning begins once the step's answers are complete."""
        return any(self.granularity(edge) == "batch" for edge in self.edges)

    @property
    def reward_stages(self) -> list[str]:
        """The reward stages, each behind those that it receives from."""
        ordered: list[str] = []
        waiting = self.of("reward")
        while waiting:
            ready = [name for name in waiting if not {edge.source for edge in self.into(name)} & {*waiting}]
            ordered += ready or waiting  # A graph with a cycle is refused, and has no order.
            waiting = [name for name in waiting if name not in ordered]
        return ordered


EMBODIED, CONVERSATIONS = "embodied", "agentic"
TOOLS = "tools"
"""The built-in task in which the model may call tools."""
REASONING = "reasoning"
"""The built-in workflow of a language model that speaks with environments."""
SUPERVISED, PREFERENCE, REWARD_MODEL = "supervised", "preference", "reward_model"
"""Workflows whose answers the data gives: to be imitated, to be compared with each other, and to be judged."""
GIVEN = (SUPERVISED, PREFERENCE, REWARD_MODEL)
LEROBOT = "lerobot"
"""The data source whose rows are moments of demonstrations: a supervised run of it has a robot policy."""
DISTILL = "distill"
"""The algorithm that learns from a teacher."""
MOST_WORDS = 256
"""Whose log-probs a teacher tells in the place of one token: 2 KiB of a trajectory."""
SESSION = "session"
"""The workflow whose steps a loop of the user's own asks for."""
LEARN_ALONE = GraphSection(stages={"learn": GraphStage(service="trainer")}, edges=[])
BUILT_IN = {
    REASONING: GraphSection(
        stages={
            "generate": GraphStage(service="rollout"),
            "score": GraphStage(service="reward"),
            "learn": GraphStage(service="trainer"),
        },
        edges=[
            GraphEdge(source="generate", target="score"),
            GraphEdge(source="score", target="learn"),
        ],
    ),
    EMBODIED: GraphSection(
        stages={
            "generate": GraphStage(service="rollout"),
            "simulate": GraphStage(service="simulator"),
            "learn": GraphStage(service="trainer"),
        },
        edges=[
            GraphEdge(source="generate", target="simulate", granularity="turn"),
            GraphEdge(source="simulate", target="generate", granularity="turn"),
            GraphEdge(source="generate", target="learn"),
        ],
    ),
    CONVERSATIONS: GraphSection(
        stages={
            "generate": GraphStage(service="rollout"),
            "simulate": GraphStage(service="simulator"),
            "score": GraphStage(service="reward"),
            "learn": GraphStage(service="trainer"),
        },
        edges=[
            GraphEdge(source="generate", target="simulate", granularity="turn"),
            GraphEdge(source="simulate", target="generate", granularity="turn"),
            GraphEdge(source="generate", target="score"),
            GraphEdge(source="score", target="learn"),
        ],
    ),
    **dict.fromkeys(GIVEN, LEARN_ALONE),
    SESSION: GraphSection(
        stages={"generate": GraphStage(service="rollout"), "learn": GraphStage(service="trainer")},
        edges=[GraphEdge(source="generate", target="learn")],
    ),
}
"""Workflows that a spec can name."""
COMPARING = {name: graph.with_whole_groups() for name, graph in BUILT_IN.items()}
"""The same for runs whose scorers compare the answers to a prompt (`reward.give: [group]`)."""


def acts_in_environments(workflow: object) -> bool:
    """Whether the policy of a spec of this workflow, as JSON or not, acts in environments as a robot."""
    return workflow == EMBODIED


def trains_robots(workflow: object, source: object) -> bool:
    """Whether the policy of a spec of this workflow and data source is a robot's: it acts, or imitates alone."""
    return acts_in_environments(workflow) or (workflow == SUPERVISED and source == LEROBOT)


def has_given_answers(workflow: object) -> bool:
    """Whether the data of a spec of this workflow, as JSON or not, gives the answers: none is generated or scored."""
    return workflow in GIVEN


def generates(workflow: object, evaluated: object) -> bool:
    """Whether a rollout takes part: the answers are sampled, or prompts of `evaluation.data` are, in evaluations."""
    return not has_given_answers(workflow) or bool(evaluated)


def has_scorers(workflow: object) -> bool:
    """Whether scorers judge answers in the steps of a run of this workflow."""
    return not has_given_answers(workflow) and workflow != SESSION


def is_scored(workflow: object, evaluated: object) -> bool:
    """Whether scorers judge answers of a run, those of `evaluation.data` too."""
    return has_scorers(workflow) or (has_given_answers(workflow) and bool(evaluated))


def _form(given: Any) -> str:
    return "<graph>" if isinstance(given, (dict, GraphSection)) else "<name>"


WorkflowChoice = Annotated[
    Annotated[
        Literal["reasoning", "embodied", "agentic", "supervised", "preference", "reward_model", "session"],
        Tag("<name>"),
    ]
    | Annotated[GraphSection, Tag("<graph>")],
    Discriminator(_form),
]
"""A built-in workflow by name, or a graph. Tags are in angle brackets: no key of a spec is."""
