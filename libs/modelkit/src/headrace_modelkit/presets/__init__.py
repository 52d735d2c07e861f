"""Models that are made or found without a model hub, for demos and tests."""
