"""The holder's side of leases and openings, and the session with the coordinator."""
