"""Single services without a fleet: each spoken to by a test in the coordinator's place."""
