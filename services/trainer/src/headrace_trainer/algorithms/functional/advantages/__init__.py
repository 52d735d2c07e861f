"""Advantages: from rewards along time, and against the group of a prompt."""
