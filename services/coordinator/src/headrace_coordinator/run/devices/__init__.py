"""Which devices generate and learn: the placement of a run, measured and changed between steps."""
