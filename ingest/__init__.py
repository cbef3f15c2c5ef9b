"""Agents' traffic becomes events: the proxy, exact tokens, engines. Torch only inside an engine."""
