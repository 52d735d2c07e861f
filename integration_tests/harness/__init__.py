"""What the integration tests share: real fleets, real services on their own, and the audit of a run's ledger.

Speaks only public interfaces: the CLI, HTTP, gRPC, and signals to processes. Knows no service's inside.
"""
