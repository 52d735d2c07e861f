"""Search over texts of one's own, for conversations. Importing this imports no index and no model."""
