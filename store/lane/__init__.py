"""One lane on disk: frames, the one writer, recovery after a crash, and readers in any process."""
