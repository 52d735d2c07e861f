"""SmolVLA: the first layers of a SmolVLM, and an action expert that reads their keys and values."""
