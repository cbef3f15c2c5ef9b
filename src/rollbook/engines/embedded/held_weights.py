"""The weights in an engine's memory: which version they are, whether they are whole, how they change.

Every tensor has its name in a Hugging Face checkpoint. Nothing here waits for requests: the
caller ensures that no forward pass runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rollbook.engines.model_files import check_unchanged, origin_of
from rollbook.engines.weights.digests import Tensors, digest_like, digest_tensors, read_weights, widened
from rollbook.store.digest import is_tree
from rollbook.store.errors import ModelError
from rollbook.store.fold.versions import Origin

SENT = Path("tensors")
"""Stands for the path of weights that came as tensors: no directory holds them."""

NARROW = (torch.float32, torch.bfloat16, torch.float16)
"""Types that float32 holds exactly."""

Own = Callable[[Origin | None], int | None]
"""Which version of the engine's policy, in its run, a directory of that origin is; None: none of them."""


def file_views(model: Any) -> Tensors:
    """Views of a model's tensors, named and shaped as in its files: writing to one changes the model.

    In memory transformers holds a layer's experts in two tensors, gate_up_proj [experts, 2 *
    inner, hidden] (gate first) and down_proj [experts, hidden, inner]; files hold three tensors
    for each expert, except those of gpt-oss, which match the memory.
    """
    views: Tensors = {}
    apart = model.config.model_type != "gpt_oss"
    for name, tensor in model.state_dict().items():
        layer, _, kind = name.rpartition(".")
        fused = layer.endswith(".experts") and tensor.ndim == 3 and kind in ("gate_up_proj", "down_proj")
        if not apart or not fused:
            views[name] = tensor
            continue
        for expert, held in enumerate(tensor):
            if kind == "down_proj":
                views[f"{layer}.{expert}.down_proj.weight"] = held
            else:
                gate, up = held.chunk(2)
                views |= {f"{layer}.{expert}.gate_proj.weight": gate, f"{layer}.{expert}.up_proj.weight": up}
    if model.config.tie_word_embeddings:
        views.pop("lm_head.weight", None)
    return views


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The weights of a model directory, in float32. `digest` is of the tensors; `version` is None
    if the caller names none and the directory is no version of the run."""

    path: Path
    version: int | None
    tensors: Tensors
    digest: str


def read_checkpoint(path: Path, version: int | None, own: Own) -> Checkpoint:
    """Read a checkpoint to be served as `version`, or as the version of the run that it claims to be.

    Raises:
        ModelError: it is damaged, does not match its own manifest, or is another version of the
            run.
    """
    origin = origin_of(path)
    known = own(origin)
    if None not in (known, version) and known != version:
        raise ModelError(f"{path} is version {known} of its policy, not {version}")
    tensors = widened(read_weights(path))
    digest = digest_tensors(tensors, tree=origin is None or is_tree(origin.digest))
    check_unchanged(path, origin, digest)
    return Checkpoint(path, known if version is None else version, tensors, digest)


@dataclass(slots=True)
class WeightUpdate:
    """A session between begin and end: names that have come, and the version that they were called."""

    loaded: set[str] = field(default_factory=set)
    version: int | None = None


class HeldWeights:
    """A model's weights.

    Attributes:
        path: the directory that was loaded last.
        source: where the weights in memory came from: that directory, or `SENT`.
        own: which version of the run a directory is; until it is said, none is one.
        trees: whether digests of the run's weights are by blocks.
        version: of the weights; while they are not `named`, of those before them. What the engine begins with
            is version 0, until `begin_with` says otherwise.
        label: what they are called: the version, or the name that their sender gave them.
        digest: of the weights in memory, while they are whole.
        fault: why the tensors in memory are of no one version, or None. Nothing may be sampled from them.
        update: the open session, or None.
    """

    def __init__(self, model: Any, path: Path) -> None:
        self.tensors = file_views(model)
        self.path = self.source = path
        self.version, self.named, self.label = 0, True, "0"
        self.own: Own = lambda origin: None
        self.trees = True
        self._origin = origin_of(path)
        if self._origin is None:
            expected = digest_tensors(widened(read_weights(path)), tree=True)
        else:
            expected = self._origin.digest
        self.digest = self._verified(path, expected)
        self.fault: str | None = None
        self.update: WeightUpdate | None = None

    @property
    def state(self) -> str:
        """`whole`; `unnamed`: whole, but of a version that is not known yet; `updating` while a session has
        begun to change them; `mixed`."""
        if self.fault is not None:
            return "mixed"
        if self.update is not None and self.update.loaded:
            return "updating"
        return "whole" if self.named else "unnamed"

    def begin_with(self, own: Own, *, trees: bool) -> None:
        """Bind the engine's first weights to the version of the run that they are, or to version 0."""
        self.own, self.trees = own, trees
        self.digest = self._of_kind(self.digest)
        self.name(own(self._origin) or 0)

    def name(self, version: int | None, label: str | None = None) -> None:
        """Bind the weights in memory to a version; None: it is not known yet.

        Args:
            label: what their sender calls them.

        Raises:
            ModelError: they are not whole.
        """
        if self.state in ("mixed", "updating"):
            raise ModelError(f"the weights are {self.state}, and of no one version: send all of it first")
        self.named = version is not None
        self.version = self.version if version is None else version
        self.label = str(self.version) if label is None else label

    # From disk --------------------------------------------------------------------------------

    def check_fits(self, checkpoint: Checkpoint) -> None:
        """Compare names and shapes.

        Raises:
            ModelError: the checkpoint is of another architecture.
        """
        shapes = [{n: t.shape for n, t in held.items()} for held in (checkpoint.tensors, self.tensors)]
        if shapes[0] != shapes[1]:
            odd = sorted(n for n in shapes[0] | shapes[1] if shapes[0].get(n) != shapes[1].get(n))
            raise ModelError(f"{checkpoint.path}: another architecture's checkpoint (differs in {odd[:3]})")

    def load(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint that fits.

        Raises:
            ModelError: the tensors in memory afterwards differ from the checkpoint; `fault` says
                so.
        """
        self.fault = f"the weights of {checkpoint.path} did not all arrive in memory"
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(checkpoint.tensors[name])
        self.digest = self._verified(checkpoint.path, checkpoint.digest)
        self.path = self.source = checkpoint.path
        self.fault = None
        if self.update is not None:
            self.update.loaded.clear()
        self.name(checkpoint.version)

    def _verified(self, path: Path, expected: str) -> str:
        """Digest of the tensors in memory, which equals the checkpoint's."""
        own = digest_like(self.tensors, expected)
        if own != expected:
            raise ModelError(
                f"{path}: after loading, the weights digest is {own[:16]}, not {expected[:16]}: the "
                "checkpoint was changed after it was written, or is damaged, or not of this architecture"
            )
        return self._of_kind(own)

    def _of_kind(self, digest: str) -> str:
        """A digest of the tensors in memory, of the kind that the run's weights have."""
        return digest if is_tree(digest) == self.trees else digest_tensors(self.tensors, tree=self.trees)

    # From tensors -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Open a session.

        Raises:
            ModelError: one is open.
        """
        if self.update is not None:
            raise ModelError("a weight-update session is already open; call end_weight_update() first")
        self.update = WeightUpdate()

    def take(self, named: Sequence[tuple[str, torch.Tensor]], version: int | None) -> None:
        """Take some of the tensors of a version: all of them, or none where one does not fit.

        Raises:
            ModelError: no session is open, or a tensor does not fit. Weights of which some have changed
                by then are mixed.
        """
        update = self.check_session()
        try:
            wrong = [text for name, tensor in named if (text := self._misfit(name, tensor))]
            if wrong:
                raise ModelError(f"{len(wrong)} of {len(named)} tensors do not fit: {'; '.join(wrong[:3])}")
            if version is not None and update.version not in (None, version):
                raise ModelError(f"this session's tensors are version {update.version}'s, not {version}'s")
            with torch.no_grad():
                for name, tensor in named:
                    update.loaded.add(name)
                    self.tensors[name].copy_(tensor)
        except Exception as error:
            if update.loaded:
                self.fault = f"an update broke off after {self._progress(update)}: {error}"
            raise
        update.version = version if update.version is None else update.version

    def end(self) -> bool:
        """Close the session; whether the weights have changed.

        Raises:
            ModelError: no session is open, or the tensors that came are no complete version; the
                weights are mixed.
        """
        update = self.check_session()
        self.update = None
        if not update.loaded:
            return False
        lack = sorted(self.tensors.keys() - update.loaded)
        if lack:
            text = f"an update ended after {self._progress(update)}, without {lack[:3]}: send all of it anew"
            self.fault = text
            raise ModelError(text)
        self.digest, self.source, self.fault = digest_tensors(self.tensors, tree=self.trees), SENT, None
        self.name(update.version)
        return True

    def check_session(self) -> WeightUpdate:
        """The open session.

        Raises:
            ModelError: there is none.
        """
        if self.update is None:
            raise ModelError(
                "no weight-update session is open: tensors come between begin_weight_update() and "
                "end_weight_update()"
            )
        return self.update

    def _progress(self, update: WeightUpdate) -> str:
        return f"{len(update.loaded)} of {len(self.tensors)} tensors"

    def _misfit(self, name: str, tensor: torch.Tensor) -> str | None:
        own = self.tensors.get(name)
        if own is None:
            return f"{name!r} is no tensor of this model"
        if own.shape != tensor.shape:
            return f"{name!r} is {list(tensor.shape)}, not {list(own.shape)}"
        if tensor.dtype not in NARROW:
            return f"{name!r} is {tensor.dtype}, which float32 does not hold: send float32 or narrower"
        return None
