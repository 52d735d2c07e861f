"""What every Headrace service shares: serve, dial, codec, leases, logs, metrics."""

import os

# gRPC's core reports every closed connection on standard error; our own logs say what matters.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
