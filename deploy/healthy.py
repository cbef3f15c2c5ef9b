#!/opt/rollbook/bin/python
"""Ends with 0 if a server of this container, at the port given, says at /healthz that it is well."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

try:
    urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/healthz", timeout=4).read()
except urllib.error.HTTPError as error:
    sys.exit(error.read(1000).decode(errors="replace"))
except OSError as error:
    sys.exit(str(error))
