"""Recognizes secrets and replaces them. Pure."""

from rollbook.store.redaction.formats import ANY_KEY, find_keys
from rollbook.store.redaction.names import PLACEHOLDER, conversation, is_secret_name, replace_outside
from rollbook.store.redaction.scrub import DEEPEST, Scrubber, credentials, scrub_record, secrets_in, shown

__all__ = [
    "ANY_KEY",
    "DEEPEST",
    "PLACEHOLDER",
    "Scrubber",
    "conversation",
    "credentials",
    "find_keys",
    "is_secret_name",
    "replace_outside",
    "scrub_record",
    "secrets_in",
    "shown",
]
