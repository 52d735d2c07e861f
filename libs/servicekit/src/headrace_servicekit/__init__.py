"""What every Headrace service shares: serve, dial, codec, leases, logs, metrics."""
