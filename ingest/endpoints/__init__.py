"""The APIs that agents speak: each request is read into one form, and answered in its own."""
