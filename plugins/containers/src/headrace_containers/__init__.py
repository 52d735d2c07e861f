"""Containers for Headrace: environments in which agents run commands. Importing this imports nothing else."""
