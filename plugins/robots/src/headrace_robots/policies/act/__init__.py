"""ACT: a ResNet, a transformer, and a chunk of actions in one pass."""
