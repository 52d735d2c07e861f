"""Sets the number of containers or pods of a service, as the coordinator's API asks for it.

For the coordinator, `python -m headrace_servicekit.scaling docker|kubernetes` is a supervisor that starts no process
itself. It alone holds the rights that this takes.
"""
