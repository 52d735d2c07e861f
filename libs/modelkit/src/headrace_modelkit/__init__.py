"""Models, tokenizers and log-probs that rollout and trainer must agree on."""
