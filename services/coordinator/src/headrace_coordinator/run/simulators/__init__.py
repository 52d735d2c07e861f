"""The simulators of a run of episodes: their environments, their leases and their devices."""
