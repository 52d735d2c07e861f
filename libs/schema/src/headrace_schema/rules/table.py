"""What does not go together: one table, which the schema, a submission and docs/run-spec.md read.

Each row names two features of `asked`. The first one's key is refused where a run asks for the other one too. A row of
what a fleet knows judges nothing before that is resolved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.rules import asked as f
from headrace_schema.rules.features import Feature, Resolved, key
from headrace_schema.sections.generating import SamplingSection, quantized

_AGENTIC_NONE = "an agentic run has none: "
_EMBODIED_NONE = "an embodied run has none: "
_WHOLE_PROMPTS = "the environment's first messages are the prompt"
_TURNS_ELSEWHERE = "a conversation that a rollout has begun does not go on at another one"
_OF_CONVERSATIONS = {
    "data.prompt.template": _WHOLE_PROMPTS,
    "data.prompt.system": _WHOLE_PROMPTS,
    "data.prompt.prefill": _WHOLE_PROMPTS,
    "evaluation.baseline_prefill": _WHOLE_PROMPTS,
    "trainer.warmup.steps": "there are no right answers to imitate",
    "rollout.chunk_tokens": "a conversation is sent when it has ended",
    "rollout.helpers": _TURNS_ELSEWHERE,
    "trainer.helpers": _TURNS_ELSEWHERE,
    "deterministic": "turns meet in no fixed waves, as environments take their own time",
    "environment.alternating": "turns of all conversations are decoded together",
    "environment.reward": "a turn's reward is what the environment's step returns",
    "environment.stop_on_success": "a conversation ends when the environment's step says so",
    "environment.state": "the environment's messages are what the policy reads",
    "environment.cameras": "the environment's messages are what the policy reads",
    "environment.instructions": "the environment's first messages say what is asked for",
    "environment.videos": "a conversation has no pictures, and all of it is among the run's trajectories",
    "environment.variants": "give the environment options of its own in environment.options",
}
"""Keys that an agentic run does not have, and why."""
_OWN_DISTRIBUTION = "a robot policy draws actions from its own distribution"
_ON_ONE_DEVICE = "an episode does not go on elsewhere, so no device is released inside a step"
_OWN_ENGINE = "a robot policy runs in the rollout service itself"
_BOUNDED = "environment.max_episode_steps bounds an episode"
_OF_TEXT = {
    **{f"sampling.{name}": _OWN_DISTRIBUTION for name in SamplingSection.model_fields},
    "data.prompt.system": "a policy's instruction has no system message",
    "data.prompt.longest": "an instruction is no prompt",
    "data.prompt.prefill": "an episode begins with an observation",
    "data.exclude": "start states are no questions",
    "trainer.reference": "no term of it is computed for robot policies",
    "trainer.helpers": _ON_ONE_DEVICE,
    "rollout.helpers": _ON_ONE_DEVICE,
    "trainer.shared_prefix": "episodes have no common beginning",
    "trainer.backend_options.compile": "it compiles the layers of a language model",
    "trainer.backend_options.expert_parallel": "a robot policy has no experts",
    "rollout.engine": _OWN_ENGINE,
    "rollout.engine_options": _OWN_ENGINE,
    "rollout.chunk_tokens": "episodes come whole",
    "evaluation.data": "data.options name the start states; headrace eval FILE judges a policy on others",
    "evaluation.temperature": _OWN_DISTRIBUTION,
    "evaluation.max_new_tokens": _BOUNDED,
    "evaluation.baseline_prefill": "an episode begins with an observation",
    "algorithm.truncated": "an episode that is cut counts with the value of what follows",
    "reward.give": "an episode has no tokens, and its answer no text",
    "reward.truncated_reward": "an episode that is cut keeps its rewards",
    "model.gguf_file": "a robot policy is policy.json and model.safetensors",
    "model.max_context": _BOUNDED,
}
"""Keys of runs of text, and why an embodied run has none of them."""


@dataclass(frozen=True)
class Row:
    """`what` does not go with `beside`. `reason` is a format of the run; `fix` stands in place of both undos."""

    what: Feature
    beside: Feature
    reason: str
    fix: str = ""

    def problems(self, run: Resolved) -> Iterator[KeyProblemView]:
        """A problem for each key by which the run asks for `what`, where it asks for `beside` too."""
        others = list(self.beside.asked(run))
        for found in self.what.asked(run) if others else ():
            told = {"quantized": quantized(run.spec.rollout.engine_options), "family": run.blind.get(found)}
            other = next(
                (each for each in others if found.startswith(each)), others[0]
            )  # the same algorithm's
            reason = self.reason.format(spec=run.spec, run=run, **told)
            yield problem(_named(found, self.what), reason, self.fix or self._fix(run, found, other))

    def _fix(self, run: Resolved, found: str, other: str) -> str:
        ways = []
        for feature, at, it in ((self.what, found, "it"), (self.beside, other, other)):
            instead = " or ".join(run.instead.get(f"{at}:{feature.needs}", ()))
            if feature.undo and (instead or not feature.needs):
                ways.append(feature.undo.format(key=at, it=it, name=_named(at, feature), instead=instead))
        return ", or ".join(dict.fromkeys(ways))


def _named(found: str, feature: Feature) -> str:
    """The key of a plug-in's name, for a feature that is of one."""
    return f"{found}.name" if feature.needs and not found.endswith("engine") else found


def rows(*pairs: tuple[Feature, Feature] | tuple[Feature, Feature, str], because: str) -> Iterator[Row]:
    """Rows with one reason."""
    for what, beside, *fix in pairs:
        yield Row(what, beside, because, *fix)


_ONE_SIDE = "a run that shares holds the devices of one side at a time"
_OTHER_RANKS = "a group that changes by itself takes any number of ranks, and "
_ONE_VERSION = " is made with one version"
_OTHER_RUNS = "is of agentic runs, and workflow is {spec.kind}"
_OTHER_ROBOTS = "is of embodied runs, and workflow is {spec.kind}"
_ALIKE = "devices that move while answers are made make no two runs alike"
_WITH_IMAGES = "{run.images}, and "

TABLE: tuple[Row, ...] = (
    # Kinds of runs
    *(Row(key(name), f.ROBOT, _EMBODIED_NONE + why) for name, why in _OF_TEXT.items()),
    *(Row(key(name), f.AGENTIC, _AGENTIC_NONE + why) for name, why in _OF_CONVERSATIONS.items()),
    Row(f.NO_ENVIRONMENT, f.ROBOT, "an embodied run acts in one"),
    Row(
        f.NO_ENVIRONMENT,
        f.AGENTIC,
        "an agentic run speaks with one",
        "give environment.tasks: [path/to/file.py:Class], or [tools], or an agent",
    ),
    *rows(
        (key("environment", ""), f.PROMPTS_ALONE),
        (key("model.policy", ""), f.NOT_ROBOT),
        (key("trainer.warmup.demonstrations", ""), f.NOT_ROBOT),
        because=_OTHER_ROBOTS,
    ),
    *rows(
        (f.POLICIES, f.NOT_AGENTIC),
        (f.AGENT, f.NOT_AGENTIC),
        (f.ROLES, f.NOT_AGENTIC, "remove it"),
        (key("environment.rewritten_turns"), f.NOT_AGENTIC, "remove it"),
        (key("environment.max_episode_s"), f.NOT_AGENTIC, "use environment.max_episode_steps"),
        because=_OTHER_RUNS,
    ),
    Row(f.CREDIT, f.NOT_AGENTIC, "turns are those of agentic runs, and workflow is {spec.kind}", "remove it"),
    Row(f.REPLAY, f.AGENTIC, "a conversation is put together without routes"),
    *rows(
        *((key(f"agent.{name}"), f.ONLINE) for name in ("python", "command", "verifiers")),
        because="with agent.online nothing is started",
    ),
    Row(f.ENVIRONMENT, f.ONLINE, "outside clients speak with the policy, and nothing else does"),
    Row(f.OWN_SOURCE, f.ONLINE, "what is asked comes from the clients"),
    *rows(
        (f.HELDOUT, f.ONLINE, "remove it, and evaluate checkpoints with headrace eval"),
        (f.EVALUATION_DATA, f.ONLINE, "remove it, and evaluate checkpoints with headrace eval"),
        because="nobody asks held-out questions: the clients lead each conversation",
    ),
    Row(f.REMAX, f.ONLINE, "remax needs a greedy answer to each prompt, and what clients ask is sampled"),
    Row(f.ROLES, f.AGENT, "an agent leads its conversation itself", "remove it"),
    Row(f.WARMUP, f.UNSHOWN_ROBOT, "a robot policy imitates demonstrations, and there are none"),
    Row(f.DEMONSTRATIONS, f.NO_WARMUP, "they are not imitated in 0 steps"),
    # Versions
    Row(
        f.INSTALL,
        f.STRICT,
        "with algorithm.max_staleness: 0 no answer is in hand when a version is installed",
    ),
    Row(f.BESIDE, f.ROBOT, f"an episode{_ONE_VERSION}"),
    Row(f.BESIDE, f.AGENTIC, f"a conversation{_ONE_VERSION}"),
    Row(f.SHARE, f.STALE, f"{_ONE_SIDE}, so nothing is generated while it learns"),
    Row(
        f.TURNS,
        f.STALE,
        "rollout and trainer take turns on the same devices, so nothing is generated while the trainer learns, and "
        "answers would only become older",
    ),
    *rows(
        (f.TRAINER_HELPERS, f.STALE),
        (f.ROLLOUT_HELPERS, f.STALE),
        because="the last answers of a step decode beside those of the next ones, so no device is idle in a step",
    ),
    Row(
        f.STALE,
        f.DETERMINISTIC,
        "which version makes which token depends on times, so no two runs are alike",
    ),
    Row(f.STALE, f.ON_POLICY, "{algorithm} is right on samples of the newest version only"),
    Row(
        f.CURRICULUM,
        f.STALE,
        "it chooses a step's items by the pass rates of the step before, which has not ended when they start",
    ),
    # Devices
    Row(f.NAMED, f.CHOSEN, "with placement.mode: auto the run chooses its devices"),
    *rows(
        (f.RANKS, f.HYBRID),
        because="hybrid placement gives the rollouts' devices to one rank within a step",
    ),
    Row(
        f.OFFLOADED,
        f.APART,
        "in disaggregated placement both sides have their devices all the time, and stay loaded",
    ),
    Row(f.SHARE, f.HYBRID, f"{_ONE_SIDE}, and hybrid holds both"),
    Row(f.SHARE, f.AUTO, "a run that measures placements needs its devices to itself"),
    Row(f.RESIDENT, f.SHARE, "what other runs wait for is the devices and their memory"),
    Row(f.STREAMED, f.SHARE, f"{_ONE_SIDE}, so nothing can stream to the other"),
    *rows(
        (f.SHARE, f.SIMULATORS),
        (f.SHARE, f.SCORERS),
        because="runs that share give their devices away while they generate, and what others compute is lost",
    ),
    Row(f.SIMULATORS, f.NO_ENVIRONMENT, "the run has no environment, and so no simulator", "remove it"),
    Row(f.JOINT, f.NOT_ROBOT, "only simulators of robots compute on devices"),
    Row(f.TRAINER_HELPERS, f.SHARE, "a helper's devices are the run's own until the step ends"),
    Row(f.TRAINER_HELPERS, f.DETERMINISTIC, _ALIKE),
    Row(
        f.TRAINER_HELPERS,
        f.HYBRID,
        "the trainer group takes the rollouts' devices itself when the tail ends",
    ),
    Row(f.TRAINER_HELPERS, f.MEASURED, "steps in which devices move say nothing of another placement"),
    Row(f.ROLLOUT_HELPERS, f.DETERMINISTIC, _ALIKE),
    Row(
        f.ROLLOUT_HELPERS,
        f.NOT_APART,
        "they decode on devices that the trainer has for itself, which only disaggregated placement gives it",
    ),
    Row(f.CHANGING, f.DETERMINISTIC, "a deterministic run keeps its ranks"),
    *rows(
        (f.AUTO, f.OVER_HOSTS),
        (f.HYBRID, f.OVER_HOSTS),
        (f.SHARE, f.OVER_HOSTS),
        because="its hosts change devices together, at the ends of stages",
    ),
    *rows(
        *((each, f.OVER_HOSTS) for each in (f.ENVIRONMENT, f.AGENT, f.POLICIES)),
        *((each, f.OVER_HOSTS) for each in (f.ENABLE_LORA, f.ROLLOUT_HELPERS, f.TRAINER_HELPERS)),
        because="an engine over hosts answers prompts alone",
    ),
    Row(
        f.HYBRID,
        f.GPUS,
        "hybrid gives one rank several devices, and on GPUs a rank computes on one",
        "set placement.mode: disaggregated, or collocated with trainer.helpers",
    ),
    Row(
        f.RESIDENT_IN_TURNS,
        f.GPUS,
        "an engine takes the memory that it finds on a GPU, and leaves a trainer no room beside it",
    ),
    # What learns
    Row(f.NO_REFERENCE, f.DISTILL, "distill learns from a teacher"),
    Row(f.REFERENCE, f.NO_KL, "no option of {spec.algorithm.name} uses it"),
    Row(
        f.RATIO,
        f.ONE_UPDATE,
        "with one optimizer step a commit the ratio to the old policy is 1, and it has no effect",
    ),
    Row(f.CRITIC_PATH, f.CRITIC_HEAD, "a value head reads the policy's own hidden states"),
    Row(f.DROP_EQUAL, f.GROUP_OF_ONE, "a group of one is always equal"),
    Row(
        f.OTHER_BACKEND,
        f.ROBOT,
        "{spec.trainer.backend} trains language models, and a robot policy has a backend of its own",
        "remove it",
    ),
    Row(f.CONTEXT, f.ROBOT, "a robot policy has a backend of its own, whose ranks have whole episodes"),
    Row(f.OTHER_BACKEND, f.POLICIES, "{spec.trainer.backend} trains one policy"),
    Row(f.CRITIC, f.MEGATRON, "{spec.algorithm.name} learns with a critic, which megatron does not have"),
    Row(f.CHANGING, f.MEGATRON, f"{_OTHER_RANKS}megatron needs whole models"),
    Row(f.CHANGING, f.CONTEXT, f"{_OTHER_RANKS}rows are divided over some of them"),
    Row(f.TRAINER_HELPERS, f.MEGATRON, "megatron takes no gradients of helpers"),
    Row(f.TRAINER_HELPERS, f.CONTEXT, "a helper has no other ranks to divide rows with"),
    Row(f.TRAINER_HELPERS, f.EXPERTS_DIVIDED, "a helper has no other ranks to divide experts with"),
    Row(
        f.TRAINER_HELPERS,
        f.LORA,
        "a helper holds the published weights, in which adapters are merged and get no gradient of their own",
    ),
    Row(
        f.SHARED_PREFIX,
        f.MEGATRON,
        "Megatron's layers attend along rows, and follow no tree of prefixes",
    ),
    Row(
        f.SEQUENCE,
        f.UNDIVIDED,
        "it divides what tensor-parallel ranks would all have, and tensor_parallel is 1",
    ),
    Row(
        f.COMPILED,
        f.DETERMINISTIC,
        "a run that resumes takes the same steps, and what is compiled hangs on the lengths that came first",
    ),
    Row(
        f.SHARD_RANKS, f.EXPERTS_DIVIDED, "experts that are divided have one copy in the whole trainer group"
    ),
    Row(f.SHARD_KEPT, f.OFFLOADS_ALL, "it keeps what offload: parameters moves to the host"),
    # Adapters
    Row(f.LORA, f.OTHER_BACKEND, "{spec.trainer.backend} has no adapters"),
    Row(
        f.CRITIC_MODEL,
        f.LORA,
        "a critic with a model of its own has no adapters, and all its weights would be trained",
    ),
    *(
        Row(each, beside, reason)
        for each in (f.ADAPTERS_ALONE, f.ENABLE_LORA)
        for beside, reason in (
            (f.NO_LORA, "the run trains no adapters: trainer.lora is not given"),
            (f.ROBOT_LORA, "a robot policy is published whole: its heads and normalisers change, too"),
            (f.OTHER_BASES, "policies with another model, or without trainer.lora, are published whole"),
        )
    ),
    Row(f.MERGED, f.ENABLE_LORA, "whole weights have no adapters to compute with"),
    Row(
        f.ENABLE_LORA,
        f.DETERMINISTIC,
        "log-probs with adapters beside their base are not the trainer's to the bit, as those of merged ones",
    ),
    Row(f.OWN_DEVICES, f.ENABLE_LORA, "rollout.enable_lora has one engine for all policies"),
    Row(f.BY_RANKS, f.PUBLISHED_ALONE, "adapters alone are a version of one rank"),
    # Data and evaluation
    Row(f.SYSTEM, f.NO_CHAT, "text that is fed as it is has no system message"),
    Row(f.EVERY, f.NOTHING_ASKED, "there are no held-out items to evaluate"),
    Row(f.BASELINE, f.NO_HELDOUT, "there are no held-out items to evaluate"),
    Row(f.SAMPLES, f.GREEDY, "greedy decoding gives the same answer every time"),
    # Engines
    Row(
        f.DETERMINISTIC,
        f.UNSAME,
        "rollout.engine: {run.engine} cannot sample the same tokens again, since its random numbers follow its batches",
    ),
    Row(
        f.ENABLE_LORA,
        f.NO_ADAPTERS,
        "rollout.engine: {run.engine} computes with no adapters beside its model",
    ),
    Row(f.IN_FLIGHT, f.NO_SWAP, "rollout.engine: {run.engine} installs a version between answers only"),
    Row(f.REPLAY, f.NO_ROUTES, "rollout.engine: {run.engine} does not tell which experts it sent tokens to"),
    Row(
        f.REPLAY,
        f.DRAFTS,
        "the experts of drafted tokens are not told apart from those of tokens that were taken",
    ),
    Row(
        f.QUANTIZED,
        f.EXACT,
        "model.dtype: float32 asks for exact passes, and the engine would compute with {quantized}",
    ),
    Row(
        f.UNCORRECTED,
        f.QUANTIZED,
        "none takes the engine's distribution for the trainer's, and it computes with {quantized}",
    ),
    Row(f.QUANTIZED, f.ON_POLICY, "{algorithm} is right on samples of the trainer's own distribution only"),
    Row(f.EXPERTS_ONLY, f.PLAIN, "int8 is of experts alone, and {spec.model.path!r} has none"),
    Row(f.DIVIDES_EXPERTS, f.PLAIN, "{spec.model.path!r} has no experts to divide"),
    Row(f.TRUNCATES, f.DRAFTS, "rollout.engine: {run.engine} does not check drafts under it"),
    Row(
        f.TOP_P_AND_OTHERS,
        f.TOP_P_FIRST,
        "rollout.engine: {run.engine} counts top-p over all tokens, not over those that top_k and min_p leave",
    ),
    Row(f.PENALTY, f.ANSWER_ONLY, "rollout.engine: {run.engine} counts no tokens of the prompt for it"),
    # Images
    Row(
        f.NOT_REASONING,
        f.IN_DATA,
        "the data has images, which prompts of its conversations do not carry",
    ),
    Row(f.ENABLE_LORA, f.IMAGES, _WITH_IMAGES + "a vision tower's rows are not those of prompts"),
    Row(f.NO_IMAGES, f.IMAGES, _WITH_IMAGES + "rollout.engine: {run.engine} takes none here"),
    Row(f.DRAFTS, f.IMAGES, _WITH_IMAGES + "prompts with images are not drafted for"),
    Row(f.OTHER_BACKEND, f.IMAGES, _WITH_IMAGES + "{spec.trainer.backend} trains on text alone"),
    Row(f.BLIND, f.IMAGES, _WITH_IMAGES + "{family} is no family whose images are read"),
)
"""In the order in which a user reads the problems."""


def conflicts(run: Resolved) -> Iterator[KeyProblemView]:
    """The problems of every row that holds of a run."""
    for row in TABLE:
        yield from row.problems(run)


def table_rows() -> Iterator[tuple[str, str, str, str]]:
    """(what, beside, reason, fix) of each row as people read them; keys stand where a run's own values would."""
    for row in TABLE:
        ways = []
        for feature in (row.what, row.beside):
            path = found[1] if (found := re.match(r"`([^`:]+)", feature.said)) else "it"
            told = {"key": path, "name": "it", "instead": "one that can"}
            ways.append(feature.undo.format(it="it" if feature is row.what else path, **told))
        reason = re.sub(r"\{(?:spec\.|run\.)?([^}!]*)[^}]*\}", lambda found: found[1], row.reason)
        yield row.what.said, row.beside.said, reason, row.fix or ", or ".join(filter(None, ways))
