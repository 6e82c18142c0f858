"""The run config: its schema, its file format, and its reference page."""
