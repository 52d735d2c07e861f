"""The Headrace coordinator: runs, leases, ledger, streams."""
