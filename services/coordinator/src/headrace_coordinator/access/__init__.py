"""Who calls the HTTP API, what that caller may do, and what is written down of it."""
