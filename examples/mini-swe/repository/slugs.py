"""Titles as they stand in an address."""

import re


def slug(title: str) -> str:
    """The title in small letters, its words joined by single dashes."""
    return re.sub(r"\W", "-", title.strip()).lower()
