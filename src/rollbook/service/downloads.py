"""Files of weights for other programs: by addresses that are signed, and so need no key, for a while."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from pathlib import Path
from urllib.parse import urlencode

from rollbook.service.journal import Journal
from rollbook.service.lists import as_time
from rollbook.store.errors import RequestError
from rollbook.store.events import Json
from rollbook.store.safe_paths import place_inside
from rollbook.train.tenants.operations import EXTERNAL_WEIGHTS, Saved, model_in, not_there

SIGNED_S = 3600
"""An address is good for so long, and no longer than the service runs."""
ROUTE = "downloads"


class Downloads:
    """Signs addresses of files, and says which file one is of."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self._secret = journal, secrets.token_bytes(32)

    async def urls(self, path: str, caller: str | None, prefix: str) -> Json:
        """An address of each file of weights.

        Args:
            prefix: of all addresses.

        Raises:
            RequestError: 404, the weights are not there; 400, they are of another kind.
        """
        saved = self._journal.saved(path, caller)
        if saved.kind != EXTERNAL_WEIGHTS:
            text = f"{path} is not for other programs: download what save_weights_external saved"
            raise RequestError(400, "not_external", text)
        folder = place_inside(self._journal.log.path, saved.checkpoint)
        names = await asyncio.to_thread(lambda: sorted(file.name for file in folder.iterdir()))
        until = self._journal.now_us() // 1_000_000 + SIGNED_S
        model_id, name = model_in(path), path.rpartition("/")[2]
        urls = {
            file: f"{prefix}/{ROUTE}/{model_id}/{name}/{file}?"
            + urlencode({"expires": until, "signature": self._signature(saved, path, file, until)})
            for file in names
        }
        return {"urls": urls, "expires": as_time(until * 1_000_000)}

    def file(self, path: str, file: str, until: str, signature: str) -> Path:
        """The file of an address that was signed.

        Raises:
            RequestError: 404, it was not, or not for now, or the weights are not there any more.
        """
        now_us = self._journal.now_us()
        model = self._journal.operations.models.get(model_in(path))
        saved = None if model is None else model.saved.get(path)
        if saved is None or not saved.there(now_us) or not until.isdecimal():
            raise not_there("this file")
        wanted = self._signature(saved, path, file, int(until))
        if not hmac.compare_digest(wanted.encode(), signature.encode()) or now_us >= int(until) * 1_000_000:
            raise not_there("this file")
        return place_inside(self._journal.log.path, saved.checkpoint) / file  # a name that was signed

    def _signature(self, saved: Saved, path: str, file: str, until: int) -> str:
        signed = "\n".join((saved.checkpoint, path, file, str(until)))
        return hmac.new(self._secret, signed.encode(), "sha256").hexdigest()
