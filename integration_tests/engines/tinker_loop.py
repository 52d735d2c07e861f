"""A loop that a user of Tinker's client may have written, in the environment of that client: a JSON line for each step.

`python tinker_loop.py STEPS RANK SEED [PATH]`: learns one sequence with adapters of a rank (0: all weights), from a
checkpoint if there is a path, saves, and samples. `BASE_URL` and `TINKER_API_KEY` say where.
"""

import json
import os
import sys

import tinker
from tinker import types

BASE = "Qwen/Qwen3-4B-Instruct-2507"
ROW = [5, 9, 12, 7, 20, 4, 8, 3]


def told(**about: object) -> None:
    """Prints a line at once: a test waits for it."""
    print(json.dumps(about), flush=True)


def main(steps: int, rank: int, seed: int, path: str) -> None:
    """The loop."""
    service = tinker.ServiceClient(base_url=os.environ["BASE_URL"])
    if path:
        training = service.create_training_client_from_state_with_optimizer(path).result()
    else:
        training = service.create_lora_training_client(BASE, rank=rank, seed=seed).result()
    info = training.get_info()
    told(model=training.model_id, rank=info.lora_rank, name=info.model_data.model_name)
    inputs = {"target_tokens": ROW[1:], "weights": [1.0] * (len(ROW) - 1)}
    data = [types.Datum(model_input=types.ModelInput.from_ints(ROW[:-1]), loss_fn_inputs=inputs)]
    for step in range(steps):
        loss = training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        told(step=step, loss=loss.result().metrics["loss:sum"])
    state, saved = training.save_state("end"), training.save_weights_for_sampler("end")
    told(state=state.result().path, sampler=saved.result().path)
    now = training.save_weights_and_get_sampling_client().result()
    base = service.create_sampling_client(base_model=BASE).result()
    sampled = {
        "now": now,
        "saved": service.create_sampling_client(saved.result().path).result(),
        "base": base,
    }
    params = types.SamplingParams(max_tokens=6, seed=seed)
    for name, client in sampled.items():
        prompt = types.ModelInput.from_ints(ROW[:3])
        found = client.sample(prompt, 2, params, include_prompt_logprobs=True).result()
        prompts = found.prompt_logprobs
        told(**{name: [each.tokens for each in found.sequences], "prompt": prompts[1:]})
    refused(lambda: training.forward_backward(data, "stable_reinforce").result())
    refused(lambda: service.create_sampling_client(saved.result().path + "-not").result())
    told(loss=training.forward(data, "cross_entropy").result().metrics["loss:sum"])
    service.close("success").result()


def refused(call) -> None:
    """Prints what the client raises."""
    try:
        call()
    except tinker.TinkerError as error:
        told(error=type(error).__name__, message=str(error))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *(sys.argv[4:] or [""]))
