"""What the HTTP API asks of the coordinator: reads and writes, and the HTTP routes over them."""
