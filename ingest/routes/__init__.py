"""The HTTP side: who may do what, bodies, connections, routes."""
