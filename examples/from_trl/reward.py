"""Reward functions with TRL's parameters, as `GRPOTrainer(reward_funcs=[...])` takes them: nothing is changed."""


def digits(completions, solution, **kwargs):
    """The share of right digits of each answer; prompts are conversations, so answers are messages."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        sum(given == wanted for given, wanted in zip(text, right, strict=False)) / len(right)
        for text, right in zip(texts, solution, strict=True)
    ]


async def stopped(completions, solution, **kwargs):
    """A bonus for stopping in time; None for answers that begin wrong: this function says nothing about them."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        None if text[:1] != right[:1] else float(len(text) == len(right))
        for text, right in zip(texts, solution, strict=True)
    ]
