"""Robot policies and what they share, the same code in rollout and trainer. Knows no wire and no simulator."""
