"""Learning from episodes of a robot policy."""
