// Specs to start from: shorter than those of the repository's examples/, where more stand.

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

export const EXAMPLES = {
  "a tiny model, in seconds": TINY,
  "own data and reward": OWN,
  "the same with LoRA": OWN.replace("name: own-data", "name: own-data-lora").replace("reward:\n", "trainer:\n  lora: {rank: 16, alpha: 32}\nreward:\n").replace("1.0e-6", "2.0e-5"),
};
