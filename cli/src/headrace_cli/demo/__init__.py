"""The demo: a preset's model, a fleet of its own, one run shown live, and what came of it."""
