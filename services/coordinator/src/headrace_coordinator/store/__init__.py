"""The event log in Redis: the only writer of durable state."""
