"""Diffusion policies: pictures and states condition a network that takes the noise from a chunk of actions."""
