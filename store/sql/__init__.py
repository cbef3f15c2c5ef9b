"""SQL over the log: DuckDB views, their documentation, and what the commands print."""
