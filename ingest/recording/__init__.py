"""From turns to events in the log, and back from the log after a restart."""
