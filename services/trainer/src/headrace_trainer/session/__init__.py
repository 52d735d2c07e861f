"""A run on the leader of a trainer group, and what it publishes and carries on."""
