"""Which sequences go into which micro-batch and round."""
