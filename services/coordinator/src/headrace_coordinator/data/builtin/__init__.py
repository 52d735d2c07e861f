"""The built-in data sources, and how rows of tables become items."""
