"""`rollbook serve`: settings, and the parts of a proxy put together."""
