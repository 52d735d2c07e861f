"""The holder's side of leases and openings, and the lifeline to the coordinator."""
