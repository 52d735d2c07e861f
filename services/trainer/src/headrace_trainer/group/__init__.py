"""The trainer group: ranks, and the rounds in which they advance."""
