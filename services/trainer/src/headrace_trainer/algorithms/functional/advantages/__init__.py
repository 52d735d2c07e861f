"""Advantages: from rewards along time, against the group of a prompt, and of episodes."""
