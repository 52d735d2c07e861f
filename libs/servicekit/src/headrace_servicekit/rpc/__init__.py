"""gRPC as all services use it: servers, clients, errors, tensors, streams."""
