"""Fleets on the nodes of a Slurm job, each with one run."""
