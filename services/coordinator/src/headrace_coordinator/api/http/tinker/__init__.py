"""The HTTP form that Tinker's client (the package `tinker`) speaks, over session runs: routes under /tinker/api/v1.

Keeps nothing of its own: ids of models, samplers and promises say what they stand for, so that a restart of the
coordinator loses none.
"""

PREFIX = "/tinker"
KEY_PREFIX = "tml-"
"""Begins the keys that Tinker's client sends, which are otherwise the API's token."""
