"""Samples that are exchanges: the run's policy answers, and another policy, here or elsewhere, replies."""
