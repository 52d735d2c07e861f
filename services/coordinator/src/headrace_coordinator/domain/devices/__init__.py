"""Who may use which instances and devices: admission, leases, placements, turns of runs that share."""
