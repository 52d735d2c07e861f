"""Runs a fleet as local processes under one data directory: store, coordinator, services' instances."""
