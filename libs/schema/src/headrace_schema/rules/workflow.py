"""What is wrong with a declared workflow: each problem names the stage or the edge, and the fix."""

from __future__ import annotations

from collections.abc import Iterator

from headrace_schema.problems import choose, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.run import RunSections
from headrace_schema.workflow import GraphEdge, GraphSection

NAMES = {"rollout": "generate", "trainer": "learn"}
"""What the one stage of each of these services is called."""
TAKEN = frozenset({"checkpoint", "evaluate", "generate", "learn", "protocol", "regroup", "switch", "sync"})
"""Names of times of a step: no reward stage has them."""


def workflow_problems(spec: RunSections) -> Iterator[KeyProblemView]:
    """Every problem of the spec's graph and of the scorers that it names."""
    graph = spec.graph
    if graph is spec.workflow:
        wrong = [*_stages(graph), *_edges(graph)]
        yield from wrong
        if not wrong:
            yield from _cycles(graph)
            yield from _loose_ends(graph)
    yield from _scorers(spec, graph)


def _stages(graph: GraphSection) -> Iterator[KeyProblemView]:
    for service, name in NAMES.items():
        found = graph.of(service)
        if not found:
            yield problem(
                "workflow.stages",
                f"no stage of the service {service}",
                f"add {name}: {{service: {service}}}",
            )
        if extra := next((other for other in found if other != name), ""):
            reason = f"a run has one {service} stage, called {name}; here are {', '.join(found)}"
            fix = f"call it {name}" if len(found) == 1 else "remove it"
            if service == "rollout" and len(found) > 1:
                fix += "; policies that answer each other are roles of workflow: agentic (docs/agents.md)"
            yield problem(f"workflow.stages.{extra}", reason, fix)
    for name in graph.of("simulator"):
        reason = "the simulator has a stage in the built-in workflows embodied and agentic alone"
        yield problem(f"workflow.stages.{name}.service", reason, "use rollout, reward or trainer")
    if not graph.of("reward"):
        yield problem("workflow.stages", "no stage of the service reward", "add score: {service: reward}")
    for name, stage in graph.stages.items():
        key = f"workflow.stages.{name}"
        if stage.service == "reward" and name in TAKEN:
            yield problem(key, "the name is that of another part of a step", "call it such as score or judge")
        if stage.combine == "replace" and not _rewarded(graph, name):
            reason = "replaces the rewards of earlier stages, and receives from none"
            yield problem(f"{key}.combine", reason, "remove it, or add an edge from a reward stage")


def _rewarded(graph: GraphSection, name: str) -> bool:
    return any(edge.source in graph.of("reward") for edge in graph.into(name))


def _edges(graph: GraphSection) -> Iterator[KeyProblemView]:
    seen: set[tuple[str, str]] = set()
    for index, edge in enumerate(graph.edges):
        key = f"workflow.edges[{index}]"
        unknown = [name for name in ("source", "target") if getattr(edge, name) not in graph.stages]
        for name in unknown:
            stage = getattr(edge, name)
            what = "produces it" if name == "source" else "receives it"
            yield problem(f"{key}.{name}", f"no stage {stage!r} {what}", choose(stage, graph.stages))
        if unknown:
            continue
        if (edge.source, edge.target) in seen:
            yield problem(key, f"{edge.source} → {edge.target} is declared twice", "remove one")
        seen.add((edge.source, edge.target))
        yield from _types(graph, edge, key)


def _types(graph: GraphSection, edge: GraphEdge, key: str) -> Iterator[KeyProblemView]:
    source, target = graph.stages[edge.source].service, graph.stages[edge.target].service
    words = f"{edge.source} → {edge.target}"
    if source == "trainer":
        reason = f"{words}: a step ends with {edge.source}; its weights reach the rollout by themselves"
        yield problem(key, reason, "remove the edge")
    elif target == "rollout":
        reason = f"{words}: {edge.target} reads the run's prompts, not what {edge.source} makes"
        yield problem(key, reason, "remove the edge")
    elif (source, target) == ("rollout", "trainer"):
        reason = f"{words}: {edge.target} reads rewards, and {edge.source} makes answers without one"
        yield problem(key, reason, "put a reward stage between them")
    elif target == "trainer" and edge.granularity == "trajectory":
        reason = f"{words}: {edge.target} compares the answers of a group"
        yield problem(f"{key}.granularity", reason, "use group or batch")
    elif edge.granularity == "turn":
        yield problem(f"{key}.granularity", f"{words} is no cycle", "use trajectory, group or batch")
    elif target == "reward" and edge.granularity == "batch":
        reason = f"{words}: {edge.target} scores one answer at a time"
        yield problem(f"{key}.granularity", reason, "use trajectory or group")
    if edge.at_least is not None and (source, target) != ("reward", "reward"):
        reason = f"{words}: {edge.source} gives no reward to compare with"
        if target == "trainer":
            reason = f"{words}: {edge.target} reads whole groups, and no answer leaves one"
        yield problem(f"{key}.at_least", reason, "remove it")


def _cycles(graph: GraphSection) -> Iterator[KeyProblemView]:
    """Yields a problem for each set of stages that form cycles; where cycles overlap, each of them must be opened."""
    reach = {name: {edge.target for edge in graph.edges if edge.source == name} for name in graph.stages}
    for middle in graph.stages:
        for name in graph.stages:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    found: dict[frozenset[str], None] = {}
    for name in graph.stages:
        if name in reach[name]:
            found[frozenset(other for other in reach[name] if name in reach[other])] = None
    for cycle in found:
        inner = [edge for edge in graph.edges if {edge.source, edge.target} <= cycle]
        stage = min(cycle)
        several = "lies on cycles that overlap" if len(inner) > len(cycle) else "lies on a cycle"
        listed = ", ".join(f"{edge.source} → {edge.target}" for edge in inner)
        reason = f"{several} ({listed}): a step scores an answer once in each stage"
        yield problem(f"workflow.stages.{stage}", reason, "remove an edge of each cycle")


def _loose_ends(graph: GraphSection) -> Iterator[KeyProblemView]:
    for name, stage in graph.stages.items():
        key = f"workflow.stages.{name}"
        if name != "generate" and not graph.into(name):
            sources = [other for other in (*graph.of("reward"), "generate") if other != name]
            fix = f"add {{source: {sources[0]}, target: {name}}} to workflow.edges, or remove the stage"
            yield problem(key, "no stage produces what it reads", fix)
        if stage.service != "trainer" and all(edge.source != name for edge in graph.edges):
            end = graph.of("reward" if stage.service == "rollout" else "trainer")[0]
            fix = f"add {{source: {name}, target: {end}}} to workflow.edges, or remove the stage"
            yield problem(key, "no stage reads what it makes", fix)


def _scorers(spec: RunSections, graph: GraphSection) -> Iterator[KeyProblemView]:
    stages = graph.of("reward")
    if "group" in spec.reward.give and not graph.whole_groups:
        fix = "give an edge into a reward stage granularity: group (docs/workflows.md)"
        yield problem("reward.give", "no reward stage waits for whole groups", fix)
    for name in spec.reward.stages:
        if name not in stages:
            reason = "the workflow has no reward stage of this name"
            yield problem(f"reward.stages.{name}", reason, choose(name, stages))
    without = [name for name in stages if name not in spec.reward.stages]
    if stages and len(without) != 1:
        reason = (
            f"{' and '.join(without)} have no scorers of their own; reward.scorers are those of one stage"
        )
        key = f"reward.stages.{without[-1]}" if without else "reward.stages"
        fix = (
            f"add reward.stages.{without[-1]} with its scorers" if without else f"remove {stages[0]} from it"
        )
        if not without:
            reason = "every reward stage has scorers of its own, so that reward.scorers are nobody's"
        yield problem(key, reason, fix)
