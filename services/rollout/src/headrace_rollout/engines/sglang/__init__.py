"""SGLang as an engine. Importing this imports neither torch nor SGLang."""
