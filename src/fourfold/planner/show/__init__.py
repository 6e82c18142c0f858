"""Plans as tables, HTML reports and traces."""
