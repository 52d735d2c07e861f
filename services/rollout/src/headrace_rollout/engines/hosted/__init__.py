"""Engines that run in processes of their own and take requests by token ids: one adapter, a backend for each."""
