"""`rollbook train`, `score`, `plot`, `preflight` and `doctor`: trainings begun, watched and judged."""
