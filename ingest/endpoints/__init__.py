"""The APIs that agents speak, a module each.

In: a request's body. Out: the one form that the proxy works with, and a reply, whole or streamed, in the
API's own form.
"""
