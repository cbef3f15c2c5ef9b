"""The public methods of the pinned client's classes: prints a JSON line, class -> methods."""

from __future__ import annotations

import json

import tinker
from tinker.lib.public_interfaces.rest_client import RestClient

CLASSES = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, RestClient)


def methods(kind: type) -> list[str]:
    """Those that ask a service of something; each with `_async` behind it is the same."""
    return [
        name
        for name in dir(kind)
        if not name.startswith("_") and callable(getattr(kind, name)) and not name.endswith("_async")
    ]


if __name__ == "__main__":
    print(json.dumps({kind.__name__: methods(kind) for kind in CLASSES}))
