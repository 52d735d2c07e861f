"""Keys that kinds of runs do not have, and why: rows of the table, by kind."""

from __future__ import annotations

from headrace_schema.sections.generating import RolloutSection, SamplingSection

_WHOLE_PROMPTS = "the environment's first messages are the prompt"
_TURNS_ELSEWHERE = "a conversation that a rollout has begun does not go on at another one"
OF_CONVERSATIONS = {
    "data.prompt.template": _WHOLE_PROMPTS,
    "data.prompt.system": _WHOLE_PROMPTS,
    "data.prompt.prefill": _WHOLE_PROMPTS,
    "evaluation.baseline_prefill": _WHOLE_PROMPTS,
    "trainer.warmup.steps": "there are no right answers to imitate",
    "rollout.chunk_tokens": "a conversation is sent when it has ended",
    "rollout.helpers": _TURNS_ELSEWHERE,
    "trainer.helpers": _TURNS_ELSEWHERE,
    "environment.alternating": "turns of all conversations are decoded together",
    "environment.reward": "a turn's reward is what the environment's step returns",
    "environment.stop_on_success": "a conversation ends when the environment's step says so",
    "environment.horizon": "a conversation does not go on in another slot",
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
OF_TEXT = {
    **{f"sampling.{name}": _OWN_DISTRIBUTION for name in SamplingSection.model_fields},
    "data.prompt.system": "a policy's instruction has no system message",
    "data.prompt.longest": "an instruction is no prompt",
    "data.prompt.prefill": "an episode begins with an observation",
    "data.exclude": "start states are no questions",
    "trainer.reference": "no term of it is computed for robot policies",
    "trainer.helpers": _ON_ONE_DEVICE,
    "trainer.draft": "actions are not drafted",
    "rollout.helpers": _ON_ONE_DEVICE,
    "trainer.shared_prefix": "episodes have no common beginning",
    "trainer.backend_options.compile": "it compiles the layers of a language model",
    "trainer.backend_options.offload_activations": "it moves the inputs of a language model's layers",
    "trainer.backend_options.fp8": "it multiplies in the layers of a language model",
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
_NOTHING_SAMPLED, _NO_ROLLOUT = "its answers are the data's, and none is sampled", "no rollout takes part"
NO_SCORER, _EVALUATED = (
    "no scorer takes part",
    "a held-out answer is read by the trainer, and none is sampled",
)
OF_GENERATED = {
    **{f"sampling.{name}": _NOTHING_SAMPLED for name in SamplingSection.model_fields},
    **{f"rollout.{name}": _NO_ROLLOUT for name in RolloutSection.model_fields if name != "helpers"},
    **{f"reward.{name}": NO_SCORER for name in ("evaluation", "stages", "give", "truncated_reward")},
    **{
        f"evaluation.{name}": _EVALUATED
        for name in ("temperature", "samples", "max_new_tokens", "baseline_prefill")
    },
    "placement.rollout": _NO_ROLLOUT,
}
"""Keys of runs in which a rollout takes part, and why one whose data gives the answers has none without
`evaluation.data`."""
OF_SAMPLED = {
    "rollout.helpers": "they decode in its steps, and none does",
    "algorithm.max_staleness": _NOTHING_SAMPLED,
    "algorithm.truncated": "no limit cuts an answer",
    "data.curriculum": "it chooses prompts by how many sampled answers pass",
    "data.prompt.longest": "leave long rows out with data.options.longest_question",
    "trainer.helpers": "they learn while rollouts generate",
    "trainer.warmup.steps": "the run itself is what a warm-up is the short form of",
}
"""Keys of runs that sample answers, and why a run whose data gives them has none."""
OF_SHOWN = {
    **{name: why for name, why in OF_TEXT.items() if name not in OF_GENERATED | OF_SAMPLED},
    "data.exclude": "rows are moments, which have no question",
    "data.prompt.prefill": "an action is imitated, and no text",
    "evaluation.data": "judge its export in a simulator: headrace eval FILE",
    "model.max_context": "a moment has as many positions as the policy gives it",
}
"""Keys of runs of text that a run which imitates demonstrations alone has not, and why."""


_EACH_SAYS, LOOP_JUDGES = "each sample says how it is drawn", "its loop judges samples by itself"
OF_RUNS_BY_THEMSELVES = {
    **{f"sampling.{name}": _EACH_SAYS for name in SamplingSection.model_fields},
    **{f"reward.{name}": LOOP_JUDGES for name in ("evaluation", "stages", "give", "truncated_reward")},
    **{
        f"evaluation.{name}": LOOP_JUDGES
        for name in ("every", "temperature", "samples", "max_new_tokens", "baseline_prefill", "data")
    },
    "data.heldout": LOOP_JUDGES,
    "data.curriculum": "its loop chooses what is asked",
    "algorithm.max_staleness": "its loop says which version samples",
    "algorithm.truncated": "its loop says which tokens count",
    "rollout.chunk_tokens": "samples come whole",
    "rollout.helpers": "its loop says when samples are made",
    "trainer.helpers": "its loop says when gradients are made",
    "trainer.reference": "open a session of the reference, and ask it for log-probs",
    "trainer.warmup.steps": "its loop makes such steps with cross_entropy",
    "trainer.draft": "its loop names all that learns",
    "optimizer.schedule": "each step brings its learning rate",
}
"""Keys of runs that make their steps by themselves, and why a session has none of them."""
