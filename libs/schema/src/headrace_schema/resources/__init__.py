"""What the HTTP API shows: resources as JSON, which the coordinator makes and clients read."""
