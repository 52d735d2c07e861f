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
from headrace_schema.rules import absent
from headrace_schema.rules import asked as f
from headrace_schema.rules.features import ALL_READERS, Feature, Resolved, key
from headrace_schema.sections.generating import quantized


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
            other = next(
                (each for each in others if found.startswith(each)), others[0]
            )  # the same algorithm's
            told = {
                "quantized": quantized(run.spec.rollout.engine_options),
                "family": run.blind.get(found),
                "algorithm": getattr(run.spec.algorithms.get(other), "name", ""),
            }
            reason = self.reason.format(spec=run.spec, run=run, **told)
            yield problem(_named(found, self.what), reason, self.fix or self._fix(run, found, other))

    def _fix(self, run: Resolved, found: str, other: str) -> str:
        ways = []
        for feature, at, it in ((self.what, found, "it"), (self.beside, other, other)):
            instead = " or ".join(run.instead.get(f"{at}:{feature.needs}", ()))
            told = {"name": _named(at, feature), "readers": run.readers}
            if feature.undo and (instead or not feature.needs):
                ways.append(feature.undo.format(key=at, it=it, instead=instead, **told))
        return ", or ".join(dict.fromkeys(ways))


def _named(found: str, feature: Feature) -> str:
    """The key of a plug-in's name, for a feature that is of one."""
    return f"{found}.name" if feature.needs and found.endswith("algorithm") else found


_WHOLE = {
    f.NO_LORA: "the run trains no adapters: trainer.lora is not given",
    f.ROBOT_LORA: "a robot policy is published whole: its heads and normalisers change, too",
    f.OTHER_BASES: "policies with another model, or without trainer.lora, are published whole",
}
"""Why adapters are not published alone."""
_ONE_SIDE = "a run that shares holds the devices of one side at a time"
_OTHER_RANKS = "a group that changes by itself takes any number of ranks, and "
_OF_AGENTIC = "is of agentic runs, and workflow is {spec.kind}"
_OF_EMBODIED = "is of embodied runs, and workflow is {spec.kind}"
_ALIKE = "devices that move while answers are made make no two runs alike"
_UNASKED = "nobody asks held-out questions: the clients lead each conversation"
_LATER = "remove it, and evaluate checkpoints with headrace eval"
_DECODING = "the last answers of a step decode beside those of the next ones, so no device is idle in a step"
_AWAY = "runs that share give their devices away while they generate, and "
_SEES = "{run.images}, and "
_NOT_WITH: dict[Feature, dict[Feature, str | tuple[str, str]]] = {
    f.ROBOT: {
        **{key(name): f"an embodied run has none: {why}" for name, why in absent.OF_TEXT.items()},
        f.NO_ENVIRONMENT: "an embodied run acts in one",
        f.BESIDE: "an episode is made with one version",
        f.OTHER_BACKEND: (
            "{spec.trainer.backend} trains language models, and a robot policy has a backend of its own",
            "remove it",
        ),
        f.OWN_SOURCE: (
            "{spec.data.source} has questions, and an episode begins with a start state",
            "set data.source: episodes, or leave data.source out",
        ),
        f.CONTEXT: "a robot policy has a backend of its own, whose ranks have whole episodes",
        f.NOT_PLAIN_ADAMW: "a robot policy's learner has AdamW with fp32 moments alone",
    },
    f.AGENTIC: {
        **{key(name): f"an agentic run has none: {why}" for name, why in absent.OF_CONVERSATIONS.items()},
        f.NO_ENVIRONMENT: (
            "an agentic run speaks with one",
            "give environment.tasks: [path/to/file.py:Class], or [tools], or an agent",
        ),
        f.REPLAY: "a conversation is put together without routes",
        f.BESIDE: "a conversation is made with one version",
    },
    f.GIVEN: {
        **{key(name): f"such a run has none: {why}" for name, why in absent.OF_SAMPLED.items()},
        f.SHARE: "it would share its devices while rollouts generate, and none does",
        f.IN_TURNS: ("the trainers have the devices all the time", "leave it out"),
    },
    f.READS_ALONE: {
        **{key(name): f"such a run has none: {why}" for name, why in absent.OF_GENERATED.items()},
        f.GIVEN_SCORERS: f"such a run has none: {absent.NO_SCORER}",
    },
    f.IMITATES: {
        f.NOT_SFT: "supervised runs imitate the answers of the data, and {spec.algorithm.name} learns from rewards",
        f.ONE_ANSWER: "a row has one answer",
    },
    f.SHOWN: {
        **{key(name): f"a robot policy has none: {why}" for name, why in absent.OF_SHOWN.items()},
        f.OTHER_BACKEND: "{spec.trainer.backend} trains language models, and a robot policy has a backend of its own",
        f.CONTEXT: "a robot policy has a backend of its own, whose ranks have whole moments",
        f.NOT_PLAIN_ADAMW: "a robot policy's learner has AdamW with fp32 moments alone",
        key("algorithm.options.turns"): "a moment has no turns",
    },
    f.PREFERS: {
        f.NOT_PAIRWISE: "preference runs compare two answers of the data, and {spec.algorithm.name} does not",
        f.TWO_ANSWERS: "a row has two answers that are compared",
    },
    f.JUDGES: {
        f.NOT_JUDGE: "reward_model runs learn to judge the answers of the data, and {spec.algorithm.name} does not",
        key("evaluation.data"): "its model judges answers, and gives none",
        key("data.prompt.prefill"): "the scorer reads whole answers, which nothing begins",
        key("data.prompt.template_arguments"): "the scorer gives the chat template messages alone",
    },
    f.OF_PAIRS: {f.TWO_ANSWERS: "a row has two answers that are compared"},
    f.OF_STEPS: {f.ONE_ANSWER: "a row has one answer, in steps"},
    f.ASKED: {
        **{key(name): f"a session has none: {why}" for name, why in absent.OF_RUNS_BY_THEMSELVES.items()},
        f.GIVEN_SCORERS: f"a session has none: {absent.LOOP_JUDGES}",
        f.NOT_ASKED_LOSSES: "in a session each call names its loss",
        f.ONE_ANSWER: "in a session a call brings any number of sequences",
        f.MORE_PROMPTS: "in a session a step takes what its loop sends",
        f.OTHER_MODES: "sides of a session take turns or have devices of their own",
        f.SHARE: "its loop says when devices idle: it pauses after session.idle_s",
        f.DETERMINISTIC: "calls are computed as they come",
        f.OTHER_BACKEND: "{spec.trainer.backend} computes no losses that calls name",
        f.NOT_PLAIN_ADAMW: "each step of a session brings the parameters of AdamW",
    },
    f.NOT_ASKED: {
        f.ASKED_LOSSES: "its losses are named by the calls of a session, and workflow is {spec.kind}",
        f.SESSION_KEY: "is of session runs, and workflow is {spec.kind}",
    },
    f.NO_IMITATION: {
        f.SFT: "{spec.algorithm.name} imitates the answers of the data, and workflow is {spec.kind}",
        f.MOMENTS: "demonstrations are imitated, and workflow is {spec.kind}",
    },
    f.NO_PREFERENCE: {
        f.PAIRWISE: "{spec.algorithm.name} compares answers of the data, and workflow is {spec.kind}"
    },
    f.NO_JUDGE: {
        f.JUDGE: "{spec.algorithm.name} learns to judge answers of the data, and workflow is {spec.kind}"
    },
    key("after"): {
        key("from_checkpoint"): "a run begins with another one's export, or with a checkpoint",
        f.POLICIES: "another run's export is one model",
    },
    f.PROMPTS_ALONE: {key("environment", ""): _OF_EMBODIED},
    f.TEXT: {key("model.policy", ""): "is a robot's, and workflow is {spec.kind}"},
    f.NOT_ROBOT: {
        key("trainer.warmup.demonstrations", ""): _OF_EMBODIED,
        key("reward.pictures"): _OF_EMBODIED,
        f.JOINT: "only simulators of robots compute on devices",
    },
    f.NOT_AGENTIC: {
        f.POLICIES: _OF_AGENTIC,
        f.AGENT: _OF_AGENTIC,
        f.ROLES: (_OF_AGENTIC, "remove it"),
        key("environment.rewritten_turns"): (_OF_AGENTIC, "remove it"),
        key("environment.max_episode_s"): (_OF_AGENTIC, "use environment.max_episode_steps"),
        key("environment.max_episode_tokens"): (_OF_AGENTIC, "use environment.max_episode_steps"),
        key("environment.on_overflow"): (_OF_AGENTIC, "remove it"),
        f.CREDIT: ("turns are those of agentic runs, and workflow is {spec.kind}", "remove it"),
    },
    f.ONLINE: {
        **{key(f"agent.{name}"): "nothing is started then" for name in ("python", "command", "backend")},
        f.ENVIRONMENT: "outside clients speak with the policy, and nothing else does",
        f.OWN_SOURCE: "what is asked comes from the clients",
        f.HELDOUT: (_UNASKED, _LATER),
        f.EVALUATION_DATA: (_UNASKED, _LATER),
        key("sampling.stages"): "one limit holds for all that clients ask",
        f.DETERMINISTIC: "clients come when they like, so no two runs are alike",
        f.REMAX: "remax needs a greedy answer to each prompt, and what clients ask is sampled",
    },
    f.AGENT: {
        f.ROLES: ("an agent leads its conversation itself", "remove it"),
        key("environment.on_overflow"): ("an agent edits its conversation itself", "remove it"),
    },
    f.ROLES: {key("environment.on_overflow"): ("a role has one branch", "remove it")},
    f.NO_ENVIRONMENT: {f.SIMULATORS: ("the run has no environment, and so no simulator", "remove it")},
    f.UNSHOWN_ROBOT: {f.WARMUP: "a robot policy imitates demonstrations, and there are none"},
    f.NO_WARMUP: {f.DEMONSTRATIONS: "they are not imitated in 0 steps, nor drawn in updates"},
    f.STRICT: {f.INSTALL: "with algorithm.max_staleness: 0 no answer is in hand when a version is installed"},
    f.STALE: {
        f.SHARE: f"{_ONE_SIDE}, so nothing is generated while it learns",
        f.TURNS: "rollout and trainer take turns on the same devices, so nothing is generated while the trainer "
        "learns, and answers would only become older",
        f.TRAINER_HELPERS: _DECODING,
        f.ROLLOUT_HELPERS: _DECODING,
        f.CURRICULUM: "it chooses a step's items by the pass rates of the step before, which has not ended when they "
        "start",
    },
    f.HORIZON: {
        f.TOGETHER: "environments that one call steps wait for the action of each episode that goes on, and one that "
        "waits for its next slot has none",
        f.NOT_PPO: "what a slot cuts is worth what a critic says, and {spec.algorithm.name} has none",
        f.ONE_ANSWER: "answers of a group begin with one start state, and an environment goes on where it was",
        f.VIDEOS: "a recording begins with an episode, and a slot may begin within one",
    },
    f.DETERMINISTIC: {
        f.HORIZON: "which environment goes on in which slot hangs on how long others take",
        f.STALE: "which version makes which token depends on times, so no two runs are alike",
        f.TRAINER_HELPERS: _ALIKE,
        f.ROLLOUT_HELPERS: _ALIKE,
        f.CHANGING: "a deterministic run keeps its ranks",
        f.EXPERTS_DIVIDED: "which tokens an expert gets together hangs on the ranks, and no engine divides alike",
        f.COMPILED: "a run that resumes takes the same steps, and what is compiled hangs on the lengths that came "
        "first",
        f.ENABLE_LORA: "log-probs with adapters beside their base are not the trainer's to the bit, as those of "
        "merged ones",
    },
    f.QUANTIZED_BASE: {
        f.DETERMINISTIC: "layers compute with decoded weights beside their adapters, and engines with merged ones",
        f.OFFLOADS_ALL: "the codes lie where they are computed with, whole on each rank",
        f.COMPILED: "codes are decoded outside of what is compiled",
        f.ROBOT: "a robot policy's adapters have frozen weights as they are",
    },
    f.CHOSEN: {f.NAMED: "with placement.mode: auto the run chooses its devices"},
    f.AUTO: {f.SHARE: "a run that measures placements needs its devices to itself"},
    f.MEASURED: {f.TRAINER_HELPERS: "steps in which devices move say nothing of another placement"},
    f.HYBRID: {
        f.SHARE: f"{_ONE_SIDE}, and hybrid holds both",
        f.TRAINER_HELPERS: "the trainer group takes the rollouts' devices itself when the tail ends",
    },
    f.APART: {
        f.OFFLOADED: "in disaggregated placement both sides have their devices all the time, and stay loaded"
    },
    f.NOT_APART: {
        f.ROLLOUT_HELPERS: "they decode on devices that the trainer has for itself, which only disaggregated "
        "placement gives it"
    },
    f.SHARE: {
        f.RESIDENT: "what other runs wait for is the devices and their memory",
        f.STREAMED: f"{_ONE_SIDE}, so nothing can stream to the other",
        f.TRAINER_HELPERS: "a helper's devices are the run's own until the step ends",
    },
    f.SIMULATORS: {f.SHARE: f"{_AWAY}an episode would be lost"},
    f.SCORERS: {f.SHARE: f"{_AWAY}what a reward model computes would be lost"},
    f.OVER_HOSTS: {
        **dict.fromkeys(
            (f.AUTO, f.HYBRID, f.SHARE), "its hosts change devices together, at the ends of stages"
        ),
        **dict.fromkeys(
            (f.ENVIRONMENT, f.AGENT, f.POLICIES, f.ENABLE_LORA, f.ROLLOUT_HELPERS, f.TRAINER_HELPERS),
            "an engine over hosts answers prompts alone",
        ),
    },
    f.GPUS: {
        f.RESIDENT_IN_TURNS: "an engine takes the memory that it finds on a GPU, and leaves a trainer no room beside "
        "it",
    },
    f.DISTILL: {f.NO_REFERENCE: "distill learns from a teacher"},
    f.NO_WORDS: {f.DIRECTION: "it is that of a KL over several words"},
    f.TOP_WORDS: {
        f.WARMER: "the teacher tells its words at temperature 1",
        f.AGENTIC: "the teacher reads answers to prompts",
        f.OTHER_BACKEND: "{spec.trainer.backend} computes log-probs of the sampled tokens alone",
        f.CONTEXT: "ranks that divide rows compute log-probs of the sampled tokens alone",
        f.OVER_HOSTS: "an engine over hosts has no teacher beside it",
    },
    f.NO_KL: {f.REFERENCE: "no option of {spec.algorithm.name} uses it"},
    f.ONE_UPDATE: {
        f.RATIO: "with one optimizer step a commit the ratio to the old policy is 1, and it has no effect"
    },
    f.CRITIC_HEAD: {f.CRITIC_PATH: "a value head reads the policy's own hidden states"},
    f.GROUP_OF_ONE: {f.DROP_EQUAL: "a group of one is always equal"},
    f.ONE_POLICY: {f.POLICIES: "{spec.trainer.backend} trains one policy"},
    f.NO_CRITIC: {
        f.CRITIC: "{spec.algorithm.name} learns with a critic, which {spec.trainer.backend} does not have",
        f.HEADLESS: "{spec.algorithm.name} learns a scalar head, which {spec.trainer.backend} does not have",
    },
    f.FIXED_RANKS: {f.CHANGING: f"{_OTHER_RANKS}{{spec.trainer.backend}} needs whole models"},
    f.NO_HELP: {f.TRAINER_HELPERS: "{spec.trainer.backend} takes no gradients of helpers"},
    f.NO_TREES: {
        f.SHARED_PREFIX: "layers of {spec.trainer.backend} attend along rows, and follow no tree of prefixes"
    },
    f.NO_HEADS: {f.DRAFT: "{spec.trainer.backend} trains no head that drafts"},
    f.READS_NO_HEAD: {f.DRAFT: "rollout.engine: {run.engine} takes no head that is part of a version"},
    f.DRAFT: {
        f.LORA: "adapters are published without the weights beside them, which a head is among",
        f.TRAINER_HELPERS: "a helper holds the model's weights without its head",
        f.POLICIES: "an engine drafts by one head",
        f.CONTEXT: "a head reads whole sequences, and ranks have parts of them",
        f.EXPERTS_DIVIDED: "what a head learns from is computed once, and exchanges of tokens may be made again",
        f.REPLAY: "the experts of drafted tokens are not told apart from those of tokens that were taken",
        f.PREFERS: "pairs of given answers are not what the policy says",
        f.JUDGES: "its model judges answers, and gives none",
        f.NOT_PLAIN_ADAMW: "a head learns by AdamW with fp32 moments",
        f.ACTIVATIONS_AWAY: "a head reads hidden states that layers give, and was not tried with inputs on the host",
        f.TOP_WORDS: "a head was not tried beside a teacher's words",
    },
    f.NO_LOW_RANK: {f.LORA: "{spec.trainer.backend} has no adapters"},
    f.UNDIVIDED: {
        f.SEQUENCE: "it divides what tensor-parallel ranks would all have, and tensor_parallel is 1"
    },
    f.ONE_STAGE: {f.VIRTUAL: "chunks of layers go round several stages, and pipeline_parallel is 1"},
    f.OTHER_BACKEND: {
        f.NOT_PLAIN_ADAMW: "{spec.trainer.backend} has AdamW with fp32 moments alone",
    },
    f.NOT_MUON: {key("optimizer.momentum"): "it is muon's; adamw has beta1 and beta2"},
    f.CONTEXT: {
        f.CHANGING: f"{_OTHER_RANKS}rows are divided over some of them",
        f.DETERMINISTIC: "attention over divided rows has another order of sums than an engine's",
        f.TRAINER_HELPERS: "a helper has no other ranks to divide rows with",
    },
    f.EXPERTS_DIVIDED: {
        f.TRAINER_HELPERS: "a helper has no other ranks to divide experts with",
        f.SHARD_RANKS: "experts that are divided have one copy in the whole trainer group",
    },
    f.ACTIVATIONS_KEPT: {
        f.ACTIVATIONS_AWAY: "the inputs that lie on the host are those from which layers are computed again"
    },
    f.OFFLOADS_ALL: {f.SHARD_KEPT: "it keeps what offload: parameters moves to the host"},
    f.LORA: {
        f.TRAINER_HELPERS: "a helper holds the published weights, in which adapters are merged and get no gradient of "
        "their own",
        f.CRITIC_MODEL: "a critic with a model of its own has no adapters, and all its weights would be trained",
        f.MUON: "the two factors of an adapter are no matrix that could step in an orthogonal direction",
    },
    **{beside: {f.ADAPTERS_ALONE: why, f.ENABLE_LORA: why} for beside, why in _WHOLE.items()},
    f.ENABLE_LORA: {
        f.MERGED: "whole weights have no adapters to compute with",
        f.OWN_DEVICES: "rollout.enable_lora has one engine for all policies",
    },
    f.PUBLISHED_ALONE: {f.BY_RANKS: "adapters alone are a version of one rank"},
    f.NO_CHAT: {f.SYSTEM: "text that is fed as it is has no system message"},
    f.NOTHING_ASKED: {f.EVERY: "there are no held-out items to evaluate"},
    f.NO_HELDOUT: {f.BASELINE: "there are no held-out items to evaluate"},
    f.GREEDY: {f.SAMPLES: "greedy decoding gives the same answer every time"},
    f.UNSAME: {
        f.DETERMINISTIC: "rollout.engine: {run.engine} computes log-probs by kernels of its own, whose bits are not "
        "the trainer's"
    },
    f.UNLIKE: {
        f.DETERMINISTIC: "layers of {spec.trainer.backend} add up in another order than any engine, so log-probs "
        "differ in their last bits"
    },
    f.NO_ADAPTERS: {f.ENABLE_LORA: "rollout.engine: {run.engine} computes with no adapters beside its model"},
    f.NO_SWAP: {f.IN_FLIGHT: "rollout.engine: {run.engine} installs a version between answers only"},
    f.NO_LIKELIEST: {f.TOP_WORDS: "rollout.engine: {run.engine} does not tell the likeliest words"},
    f.NO_ROUTES: {f.REPLAY: "rollout.engine: {run.engine} does not tell which experts it sent tokens to"},
    f.TOP_P_FIRST: {
        f.TOP_P_AND_OTHERS: "rollout.engine: {run.engine} counts top-p over all tokens, not over those that top_k and "
        "min_p leave"
    },
    f.ANSWER_ONLY: {f.PENALTY: "rollout.engine: {run.engine} counts no tokens of the prompt for it"},
    f.DRAFTS: {
        f.REPLAY: "the experts of drafted tokens are not told apart from those of tokens that were taken",
        f.TRUNCATES: "rollout.engine: {run.engine} does not check drafts under it",
    },
    f.EXACT: {
        f.QUANTIZED: "model.dtype: float32 asks for exact passes, and the engine would compute with {quantized}"
    },
    f.QUANTIZED: {
        f.UNCORRECTED: "none takes the engine's distribution for the trainer's, and it computes with {quantized}"
    },
    f.ON_POLICY: {
        f.STALE: "{algorithm} is right on samples of the newest version only",
        f.QUANTIZED: "{algorithm} is right on samples of the trainer's own distribution only",
    },
    f.PLAIN: {
        f.EXPERTS_ONLY: "int8 is of experts alone, and {spec.model.path!r} has none",
        f.DIVIDES_EXPERTS: "{spec.model.path!r} has no experts to divide",
    },
    f.IN_DATA: {
        f.NOT_REASONING: "the data has images, which prompts of its conversations do not carry",
    },
    f.IMAGES: {
        f.ENABLE_LORA: f"{_SEES}a vision tower's rows are not those of prompts",
        f.NO_IMAGES: f"{_SEES}{{run.engine}} takes none here",
        f.TOP_WORDS: f"{_SEES}the teacher reads text alone",
        f.DRAFTS: f"{_SEES}prompts with images are not drafted for",
        f.DRAFT: f"{_SEES}prompts with images are not drafted for",
        f.TEXT_ALONE: f"{_SEES}{{spec.trainer.backend}} trains on text alone",
        f.BLIND: f"{_SEES}{{family}} is no family that reads them",
    },
}
"""By what a run has, what does not go with it: the reason, or that and a way out in place of both features' undos."""
TABLE = tuple(
    Row(what, beside, *((why,) if isinstance(why, str) else why))
    for beside, found in _NOT_WITH.items()
    for what, why in found.items()
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
            told = {"key": path, "name": "it", "instead": "one that can", "readers": ALL_READERS}
            ways.append(feature.undo.format(it="it" if feature is row.what else path, **told))
        reason = re.sub(r"\{(?:spec\.|run\.)?([^}!]*)[^}]*\}", lambda found: found[1], row.reason)
        yield row.what.said, row.beside.said, reason, row.fix or ", or ".join(filter(None, ways))
