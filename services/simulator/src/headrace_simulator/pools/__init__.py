"""Pools of environments from the service's side: what is open, who may operate, and the child processes asked."""
