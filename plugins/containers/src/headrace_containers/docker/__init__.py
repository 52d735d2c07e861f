"""Containers of a Docker engine, by the package docker."""
