"""`rollbook store ...`: commands on a store's files, and what they print."""
