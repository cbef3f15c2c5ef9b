"""`rollbook replay ...`: a module for each command, with its options and what it prints."""
