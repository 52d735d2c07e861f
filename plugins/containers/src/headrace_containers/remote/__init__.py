"""Containers of services that run one command at a time for a client: one adapter, and a thin provider for each."""
