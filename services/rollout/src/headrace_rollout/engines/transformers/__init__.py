"""The default engine: continuous batching in a loop over a Hugging Face model's forward pass."""
