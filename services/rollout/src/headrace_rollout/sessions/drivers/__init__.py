"""Drivers of Generate streams: prompts, environments, agents behind the endpoint, online clients."""
