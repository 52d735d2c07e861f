"""Which slots, trajectories and versions count: the accounts of a run's steps."""
