"""What a slug is: `python3 -m unittest`."""

import unittest

from slugs import slug


class Slugs(unittest.TestCase):
    """Titles and their slugs."""

    def test_words(self):
        """Small letters and dashes."""
        assert slug("Hello World") == "hello-world"

    def test_one_dash(self):
        """However much is between two words."""
        assert slug("Hello,  World") == "hello-world"
