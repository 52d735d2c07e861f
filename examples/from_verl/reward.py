"""A reward function with verl's parameters, as `custom_reward_function.path` names it there: nothing is changed."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of right digits; `score` is the reward, the rest is shown beside it."""
    right = sum(given == wanted for given, wanted in zip(solution_str, ground_truth, strict=False))
    return {
        "score": right / len(ground_truth),
        "acc": solution_str == ground_truth,
        "digits": extra_info["digits"],
        "of": data_source,
    }
