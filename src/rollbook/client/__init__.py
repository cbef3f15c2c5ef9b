"""Clients of a running proxy, for programs on other hosts."""
