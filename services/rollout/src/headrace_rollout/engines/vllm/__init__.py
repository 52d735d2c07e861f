"""vLLM as an engine. Importing this imports neither torch nor vLLM."""
