"""What the HTTP API may read: state, history and logs, presented as resources."""
