"""The routes of the HTTP API, one module for each resource, and the pages beside them."""
