"""The Headrace trainer service: algorithms and training backends."""
