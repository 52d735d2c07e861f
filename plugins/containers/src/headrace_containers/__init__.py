"""Containers for Headrace: environments in which agents run commands, as a plug-in of the simulator service."""
