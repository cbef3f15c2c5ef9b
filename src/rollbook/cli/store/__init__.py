"""`rollbook store ...`: what is done to a store's files, and what is said of it."""
