"""A sandbox for code that a model wrote. `run` is the outside of it, `inside` the program that shuts itself in."""
