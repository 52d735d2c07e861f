"""Pure rules: leases, versions, slots, run life. Knows no gRPC, no Redis and no clock of its own."""
