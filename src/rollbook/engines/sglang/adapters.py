"""One SGLang server that samples with low-rank adapters beside the base model's weights.

An adapter is verified before a request may name it: its factors are digested where the server reads them,
and then the server's logprobs of a fixed sequence are compared with the trainer's (`weights.peft`). The base
model is verified by the server's own checksums, as every policy is. A server that was started anew has lost
both the name of its weights and its adapters: its first answer shows it, and does not count; all is verified
again, and it is asked again.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np

from rollbook.engines.address import EngineAddress
from rollbook.engines.engine import (
    Activated,
    Generation,
    OnTokens,
    Prompt,
    Sampling,
    Scores,
    ignore_tokens,
)
from rollbook.engines.model_files import read_json
from rollbook.engines.sglang.client import SglangEngine
from rollbook.engines.sglang.http import SglangServer
from rollbook.engines.sglang.protocol import read_scores, score_body
from rollbook.engines.sglang.servers import Weights
from rollbook.engines.weights.digests import digest_tensors
from rollbook.engines.weights.peft import read_peft, read_probe
from rollbook.store.errors import EngineError, EngineLostError
from rollbook.store.events import Json, TokenIds

TRIES = 3
"""Of a request whose server is started anew meanwhile."""
BOUND, WIDE_BOUND = 1e-3, 0.3
"""Of the difference of a server's logprob from the trainer's: where both compute in float32; elsewhere."""
_WHOLE = (("q_proj", "v_proj", "k_proj"), ("gate_proj", "up_proj"))
"""Matrices that SGLang merges; the first two of a group must have factors where any of it has."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
T = TypeVar("T")
_log = logging.getLogger(__name__)


class SglangAdapters(SglangEngine):
    """Samples from the server at `url`, with the adapters that it was told to load.

    Args:
        weights: tells the base model's weights, as those of a policy's version.
        base: folder of the base model.
        most: adapters that are held at once.
    """

    def __init__(
        self,
        url: str | EngineAddress,
        weights: Weights,
        base: Path,
        *,
        most: int,
        key: str | None = None,
        admin_key: str | None = None,
    ) -> None:
        super().__init__(url, weights, key=key, admin_key=admin_key)
        config = read_json(base, "config.json")
        config = config.get("text_config", config)
        self.vocabulary = int(config["vocab_size"])
        self.context_length = int(config.get("max_position_embeddings", 2**31))
        self._dtype = str(config.get("dtype") or config.get("torch_dtype"))
        self._most = most
        self._sources: dict[str, tuple[Path, str]] = {}
        """Of each adapter that is to be held: its folder, and the digest of its factors."""
        self._verified = set[str]()
        self._named: str | None = None
        """What the server called its weights when those were verified; no other start of it does."""
        self._alone = asyncio.Lock()

    async def start(self, activated: Activated) -> None:
        """Connect, and verify that the server holds the base model's weights and takes adapters.

        Adapters of an earlier service are unloaded: they would count towards none that may be held.

        Raises:
            EngineError, VersionError: it cannot be used; the message says why.
        """
        await super().start(activated)
        try:
            if self.servers.routed:
                raise EngineError(
                    f"{self.url} is a router: adapters are loaded at one server, by its own address"
                )
            info = await self._server.server_info()
            check_options(info, self.url, self._most)
            if isinstance(longest := info.get("max_req_input_len"), int):
                self.context_length = min(self.context_length, longest + 1)
            if (dtype := info.get("dtype")) != "auto":
                self._dtype = str(dtype)
            await self._verify_base()
            for name in await self._server.adapters():
                if _DIGEST.fullmatch(name):
                    await self._server.unload_adapter(name)
        except BaseException:
            await self._disconnect()
            raise

    @property
    def _server(self) -> SglangServer:
        return self.servers.first

    # Adapters ---------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, folder: Path, digest: str) -> None:
        """Have the server hold an adapter, and verify that it does; as `ServesAdapters`.

        Raises:
            EngineError: its factors are others than the digest says, or the server's answers with it are not
                the trainer's.
        """
        async with self._alone:
            self._sources[name] = folder.absolute(), digest
            try:
                await self._load(name)
            except BaseException:
                del self._sources[name]
                raise

    async def unload_adapter(self, name: str) -> None:
        """Have the server hold an adapter no more."""
        async with self._alone:
            if name in await self._server.adapters():
                await self._server.unload_adapter(name)
            self._sources.pop(name, None)
            self._verified.discard(name)

    async def _load(self, name: str) -> None:
        if name in self._verified:
            return
        folder, digest = self._sources[name]
        await asyncio.to_thread(check_factors, folder, digest)
        held = await self._server.adapters()
        if name in held and held[name] != str(folder):
            await self._server.unload_adapter(name)
        if held.get(name) != str(folder):
            await self._server.load_adapter(name, str(folder))
        try:
            await self._compare(name, folder)
        except EngineLostError:
            raise
        except EngineError:
            await self._server.unload_adapter(name)
            raise
        self._verified.add(name)

    async def _compare(self, name: str, folder: Path) -> None:
        """Compare what the server makes of the probe with what the trainer did.

        Raises:
            EngineError: it is something else.
        """
        probe = await asyncio.to_thread(read_probe, folder)
        bound = BOUND if (probe.dtype, self._dtype) == ("float32", "float32") else WIDE_BOUND
        scores, known = await self._ask_scores(probe.ids, name, 0)
        if not known:
            raise EngineLostError(f"{self.url} was started anew while an adapter was verified")
        distance = float(np.abs(scores.logprobs[1:] - probe.logprobs).max())
        if not distance <= bound:
            raise EngineError(
                f"{self.url} with the adapter of {folder} gives logprobs that are up to {distance:.2g} away "
                f"from the trainer's, of which {bound:g} may be rounding: it does not apply these factors as "
                "they were trained, and is not asked for samples"
            )

    async def _verify_base(self) -> None:
        """Verify the base model's weights; after a new start of the server no adapter counts as verified.

        Raises:
            EngineError: it holds others.
        """
        await self.verify()
        if (why := self.unverified()) is not None:
            raise EngineError(why)
        name = str((await self._server.model_info()).get("weight_version"))
        if name != self._named:
            self._verified.clear()
        self._named = name
        self._verified &= (await self._server.adapters()).keys()

    # Sampling ---------------------------------------------------------------------------------------

    async def generate(
        self, prompt: Prompt, sampling: Sampling, on_tokens: OnTokens = ignore_tokens
    ) -> Generation:
        """Sample a completion by verified weights alone, as `SglangEngine`."""

        async def ask() -> tuple[Generation, bool]:
            made = await SglangEngine.generate(self, prompt, sampling, on_tokens)
            return made, sum(span.end - span.start for span in made.version_spans) == len(made.completion_ids)

        return await self._until_verified(prompt.adapter, ask)

    async def score(self, ids: TokenIds, adapter: str, temperature: float, top: int) -> Scores:
        """The logprobs of tokens, as `ServesAdapters`; SGLang gives those of temperature 1.

        Raises:
            EngineError: the server failed, or another temperature is asked for.
        """
        if temperature != 1.0:
            raise EngineError(
                f"SGLang tells logprobs of given tokens of temperature 1, not of {temperature:g}"
            )
        return await self._until_verified(adapter, lambda: self._ask_scores(ids, adapter, top))

    async def _ask_scores(self, ids: TokenIds, adapter: str, top: int) -> tuple[Scores, bool]:
        """(scores, whether they are by weights of a known version)"""
        answer = await self._server.generate(score_body(ids, adapter, top))
        scores = read_scores(answer, ids, top)
        return scores, self._weights.version_of(str(answer["meta_info"].get("weight_version"))) is not None

    async def _until_verified(self, adapter: str, ask: Callable[[], Awaitable[tuple[T, bool]]]) -> T:
        """What `ask` gives by verified weights; a server that was started anew is verified and asked again.

        Raises:
            EngineError: it holds other weights than those of the base model, or refuses.
        """
        for _ in range(TRIES):
            if not adapter or adapter in self._verified:
                try:
                    answer, known = await ask()
                except EngineLostError:
                    raise
                except EngineError:
                    if not adapter or adapter in await self._server.adapters():
                        raise
                    known = False
                if known:
                    return answer
            _log.warning("%s lost what was verified there: it is verified again", self.url)
            async with self._alone:
                await self._verify_base()
                if adapter:
                    await self._load(adapter)
        raise EngineLostError(f"{self.url} was started anew {TRIES} times while it was asked for one thing")


def check_options(info: Json, url: str, most: int) -> None:
    """Check that a server was started for adapters.

    Args:
        info: what /server_info answers; most: adapters at once.

    Raises:
        EngineError: it was not; the message has the flags.
    """
    targets = info.get("lora_target_modules") or []
    if not info.get("enable_lora"):
        raise EngineError(
            f"{url} takes no adapters: start it with --enable-lora, --max-lora-rank and --lora-target-modules"
        )
    if (loaded := info.get("max_loaded_loras")) is not None and loaded < most:
        raise EngineError(
            f"{url} drops adapters by itself above {loaded}: start it without --max-loaded-loras, or set "
            f"sampler.adapters = {loaded}"
        )
    if info.get("dp_size", 1) != 1:
        raise EngineError(f"{url} has replicas, and SGLang loads adapters at none of them: use --dp-size 1")
    # Its torch_native kernels count the output's rows as if every token of a batch had one, though only those
    # have whose logits are wanted (`pruned_batch_info` is not read): right for a request that is alone.
    alone = info.get("prefill_max_requests") == 1 and not info.get("enable_mixed_chunk")
    if info.get("lora_backend") == "torch_native" and {"lm_head", "all"} & {*targets} and not alone:
        raise EngineError(
            f"{url} would apply the output's factors of one request to another's tokens, as its backend "
            "torch_native does: start it with --prefill-max-requests 1, or without lm_head in "
            "--lora-target-modules"
        )


def check_factors(folder: Path, digest: str) -> None:
    """Check the factors in a folder before a server reads them.

    Raises:
        EngineError: they are others than the digest says, or SGLang cannot apply them.
    """
    factors, _ = read_peft(folder)
    if (own := digest_tensors(factors)) != digest:
        raise EngineError(f"{folder}: its factors have the digest {own[:16]}, not {digest[:16]}")
    check_targets(factors, folder)


def check_targets(names: Iterable[str], folder: Path) -> None:
    """Check that SGLang can merge an adapter's factors; a server that finds out in a batch ends with it.

    Raises:
        EngineError: a layer lacks some.
    """
    by_layer: dict[str, set[str]] = {}
    for name in names:
        module = name.split(".lora_")[0]
        layer, _, matrix = module.rpartition(".")
        by_layer.setdefault(layer, set()).add(matrix)
    for layer, matrices in by_layer.items():
        for group in _WHOLE:
            missing = [matrix for matrix in group[:2] if matrix not in matrices]
            if missing and matrices & {*group}:
                raise EngineError(
                    f"{folder}: {layer} has factors of {', '.join(sorted(matrices & {*group}))} and none of "
                    f"{missing[0]}, which SGLang merges with them: train {', '.join(group)} together"
                )
