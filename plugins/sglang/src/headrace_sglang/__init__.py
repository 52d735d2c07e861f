"""SGLang as a rollout engine of Headrace. Importing this imports neither torch nor SGLang."""
