"""The rollout's side: a robot policy on its devices, and the episodes of a stream."""
