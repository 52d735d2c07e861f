"""Files that are derived from a run's events, for people and notebooks. Nothing reads them back as truth."""
