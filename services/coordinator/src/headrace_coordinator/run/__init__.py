"""The life of one run: prepare, step, evaluate, recover."""
