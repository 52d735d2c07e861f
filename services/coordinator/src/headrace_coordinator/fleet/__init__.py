"""Instances as they are now: sessions, leases, calls, and what they have open."""
