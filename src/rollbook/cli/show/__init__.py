"""`rollbook show`: prints one trajectory, for people or as JSON."""
