"""The run spec and the HTTP API's resources, as typed models that services, CLI and client share."""
