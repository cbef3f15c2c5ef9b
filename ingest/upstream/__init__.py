"""Record-only mode.

In: requests for any API. Out: the upstream's answer byte for byte, and a turn of it in the log, exact where
the upstream tells all token ids.
"""
