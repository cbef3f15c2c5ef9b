"""Weight syncs: sends engines new weights, and verifies them by the engines' own checksums."""
