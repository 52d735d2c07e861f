"""Devices that change roles inside a step, and what a run knows of its own pace to decide it."""
