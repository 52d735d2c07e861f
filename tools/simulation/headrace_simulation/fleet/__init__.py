"""The simulated instances of a world: their processes, network and disk."""
