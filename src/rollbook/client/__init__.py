"""Clients of a running proxy, for programs on other hosts."""

from rollbook.client.tail import HttpTail

__all__ = ["HttpTail"]
