"""`rollbook replay ...`: a module for each command's options, and one for what it prints where that is
long.
"""
