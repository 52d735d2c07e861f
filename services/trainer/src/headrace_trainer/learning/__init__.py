"""Learning from settled groups: queue, packing, accumulation, commit."""
