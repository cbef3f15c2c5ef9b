"""Storage: a log in memory, objects behind HTTP."""
