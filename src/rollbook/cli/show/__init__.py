"""`rollbook show`: one trajectory as a person, or a machine, would look at it."""
