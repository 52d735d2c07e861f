// Shorter than those of examples/, where more stand.

const TINY = `name: tiny
steps: 200
model:
  path: .headrace/models/tiny   # python -m headrace_modelkit.presets.tiny DIRECTORY makes it
  dtype: float32
data:
  source: copy_digits
  heldout: 128
  prompt: {template: "{question}", chat: false}
sampling: {max_new_tokens: 4}
algorithm: {name: grpo, prompts_per_step: 16, group_size: 8}
optimizer: {lr: 5.0e-4}
trainer:
  warmup: {steps: 25, lr: 2.0e-3, batch: 64}
reward:
  scorers:
    - {name: exact}
evaluation: {every: 50, greedy: false, temperature: 1.0}
`;

const OWN = `name: own-data
steps: 200
model:
  path: Qwen/Qwen2.5-0.5B-Instruct   # a folder, or a name on the hub
data:
  source: jsonl
  options: {path: ./questions.jsonl}   # rows with "question" and "answer"
  heldout: 100
  prompt: {template: "{question}"}
sampling: {max_new_tokens: 256}
algorithm: {name: grpo, prompts_per_step: 8, group_size: 8}
optimizer: {lr: 1.0e-6}
reward:
  scorers:
    - {name: "./reward.py:score"}      # def score(prompt, completion, reference, metadata)
evaluation: {every: 20}
`;

const GIVEN = `name: imitate
workflow: supervised
steps: 200
model:
  path: Qwen/Qwen2.5-0.5B-Instruct   # a folder, or a name on the hub
data:
  source: jsonl
  options: {path: ./chats.jsonl, form: openai}   # rows with "messages"
  heldout: 100                       # their loss is measured
algorithm: {prompts_per_step: 64}
optimizer: {lr: 2.0e-5}
evaluation: {every: 20}
`;

const PAIRS = `name: prefer
workflow: preference
steps: 100
model:
  path: Qwen/Qwen2.5-0.5B-Instruct   # better: the export of a supervised run
data:
  source: jsonl
  options: {path: ./pairs.jsonl, form: dpo}      # rows with "prompt", "chosen", "rejected"
  heldout: 100
algorithm:
  name: dpo                          # or ipo, simpo, orpo, kto
  prompts_per_step: 16
optimizer: {lr: 5.0e-7}
evaluation: {every: 20}
`;

const ROBOT = `name: cartpole
workflow: embodied
steps: 30
model:
  policy: {kind: mlp, hidden: [64, 64]}
environment:
  backend: gymnasium
  tasks: [CartPole-v1]
  count: 8
data: {heldout: 32}
algorithm:
  name: ppo
  group_size: 1
  prompts_per_step: 8
  options: {epochs: 10, minibatch_size: 256, gamma: 0.98, lam: 0.95, reward_scale: 0.1, value_clip: null}
optimizer: {lr: 1.0e-3}
evaluation: {every: 10}
`;

const AGENT = `name: tools
workflow: agentic
steps: 100
model:
  path: Qwen/Qwen2.5-1.5B-Instruct   # a folder, or a name on the hub
environment:
  tasks: ["./game.py:Game"]          # a class with reset and step; see docs/agents.md
  max_episode_steps: 4               # turns
data: {heldout: 32}
sampling: {max_new_tokens: 128}      # of one turn
algorithm: {prompts_per_step: 8}
optimizer: {lr: 1.0e-6}
`;

const SESSION = `name: loop
workflow: session
model:
  path: Qwen/Qwen2.5-0.5B-Instruct   # a folder, or a name on the hub
session:
  idle_s: 600                        # without a call for so long it pauses
`;

// [workflow, what learns from what, spec]: Submit begins with this choice.
export const EXAMPLES = [
  ["reasoning", "a tiny model, in seconds", TINY],
  ["reasoning", "own data and reward", OWN],
  ["reasoning", "the same with LoRA", OWN.replace("own-data", "lora").replace("reward:\n", "trainer:\n  lora: {rank: 16, alpha: 32}\nreward:\n").replace("1.0e-6", "2.0e-5")],
  ["supervised", "given answers", GIVEN],
  ["preference", "pairs of answers (DPO)", PAIRS],
  ["reward_model", "a judge from pairs of answers", PAIRS.replace("workflow: preference", "workflow: reward_model").replace("name: prefer", "name: reward-model").replace(/name: dpo.*/, "name: bradley_terry")],
  ["agentic", "an environment or tools of one's own", AGENT],
  ["embodied", "a policy in a simulator", ROBOT],
  ["session", "a loop of one's own", SESSION],
];
