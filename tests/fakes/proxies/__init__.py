"""Proxies as tests set them up."""
