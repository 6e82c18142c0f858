"""A run's configuration: its fields, its file, and its reference."""
