"""GRPO and its relatives: an answer's advantage is its reward compared with its group's, clipped by ratios."""
