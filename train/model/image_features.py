"""Features of images among the embeddings of tokens, and the rotation by places along three axes: one object
for a rank's part of a model."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollbook.store.errors import ImageError
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.batches.images import Images
from rollbook.train.model.reshard import RankLayout
from rollbook.train.model.shape import ModelShape
from rollbook.train.model.tower import TOWER


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Features that go to places of a rank's hidden states [T, B, hidden].

    Attributes:
        at: int64 [K] each, the place in a row and the row.
        features: [K, hidden].
    """

    at: tuple[torch.Tensor, torch.Tensor]
    features: torch.Tensor

    def put_into(self, hidden: torch.Tensor, *, add: bool) -> torch.Tensor:
        """The hidden states with the features in the place of theirs, or added to them."""
        return hidden.index_put(self.at, self.features, accumulate=add)


class ImageFeatures:
    """Computes features of a micro-batch's images, and has the language half take them.

    They replace the embeddings of the tokens that stand for images, and are added to the outputs of as many
    first layers as the tower has deep features for.

    Where the tower is trained and layers are computed again in the backward pass, each of these layers has
    a backward pass of its own. So that it ends at the features, they are cut off from the tower, which is run
    again with what came back to them once all passes are done, and nothing of it is kept until then.

    Args:
        module: a rank's part of megatron's GPTModel; of a text model there is nothing to do.
        again: its layers are computed again in the backward pass.
    """

    def __init__(self, module: Any, shape: ModelShape, layout: RankLayout, *, again: bool) -> None:
        self._layout, self._again = layout, again
        self._rotation: Any = module.rotary_pos_emb if shape.vision is not None else None
        self._image_token = None if shape.vision is None else shape.vision.image_token
        self._tower: Any = getattr(module, TOWER, None)
        self._cut: list[tuple[Images, list[torch.Tensor]]] = []
        """Images whose features were cut off, and these."""
        self._hooks: list[_Hook] = []
        if self._tower is None:
            return
        embedding, layers = _Hook(add=False), [_Hook(add=True) for _ in range(shape.deep_features)]
        module.embedding.register_forward_hook(lambda _, __, output: embedding.of(output))
        for layer, hook in zip(module.decoder.layers, layers, strict=False):
            layer.register_forward_hook(lambda _, __, output, hook=hook: (hook.of(output[0]), *output[1:]))
        self._hooks = [embedding, *layers]
        finalize = module.config.finalize_model_grads_func
        if again and finalize is not None:

            def finalize_with_tower(*arguments: Any, **named: Any) -> None:
                self._finish()
                finalize(*arguments, **named)

            module.config.finalize_model_grads_func = finalize_with_tower

    def begin(self) -> None:
        """Prepare for the passes of a step: forget what an interrupted one has left."""
        self._cut.clear()
        for hook in self._hooks:
            hook.later.clear()

    @contextlib.contextmanager
    def of(self, micro: MicroBatch, multiple: int, device: torch.device) -> Iterator[None]:
        """A context in which a forward pass sees the images of a micro-batch.

        Raises:
            ImageError: tokens stand for images, and none are there.

        In a pass with gradients over layers that are computed again, what is added to their outputs is kept
        until it is asked for outside of the context: backward passes take micro-batches in the order of
        forward passes.

        Args:
            multiple: the length of the pass is a multiple of it.
        """
        images = None if self._rotation is None else micro.images
        later = self._again and torch.is_grad_enabled()
        if self._rotation is not None:
            self._check_seen(micro)
        if images is not None:
            self._rotation.placed = self._rotation.angles(_laid_out(images, micro.lengths, multiple), device)
        placed = self._placed(images, micro, multiple, device) if self._hooks and images is not None else None
        for number, hook in enumerate(self._hooks):
            hook.now, hook.within = None if placed is None else placed[number], True
            if later and hook.add:
                hook.later.append(hook.now)
        try:
            yield
        finally:
            if self._rotation is not None:
                self._rotation.placed = None
            for hook in self._hooks:
                hook.now, hook.within = None, False

    def _check_seen(self, micro: MicroBatch) -> None:
        # Their embeddings are no image, and logprobs of an engine that saw one are of another context.
        count = 0 if micro.images is None else micro.images.at.shape[1]
        if (stand := int((micro.tokens == self._image_token).sum())) != count:
            raise ImageError(
                f"{stand} tokens of samples are {self._image_token}, which stands for a part of an image, "
                f"and there are images of {count}: they were recorded without their images; leave them out"
            )

    def _placed(
        self, images: Images, micro: MicroBatch, multiple: int, device: torch.device
    ) -> list[_Placed]:
        """What goes into the embeddings, and is added to the output of each layer that takes features."""
        rows, columns = images.at
        which = images.features
        if micro.lengths is not None:
            starts = np.cumsum(micro.lengths) - micro.lengths
            rows, columns = np.zeros_like(rows), starts[rows] + columns
        if self._layout.sequence:  # this rank has some of the tokens
            length = int(micro.lengths.sum()) if micro.lengths is not None else micro.tokens.shape[1]
            share = -(-length // multiple) * multiple // self._layout.tensor
            columns = columns - share * self._layout.tensor_rank
            own = (columns >= 0) & (columns < share)
            rows, columns, which = rows[own], columns[own], which[own]
        chosen, *at = (torch.from_numpy(array).to(device) for array in (which, columns, rows))
        return [_Placed((at[0], at[1]), features[chosen]) for features in self._features(images)]

    def _features(self, images: Images) -> list[torch.Tensor]:
        """[N, hidden] of all tokens of the images that differ, for the embeddings and then for each layer."""
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self._tower.parameters())
        if trained and not self._again:
            return self._seen(images)
        with torch.no_grad():
            features = self._seen(images)
        if trained:
            features = [tensor.detach().requires_grad_() for tensor in features]
            self._cut.append((images, features))
        return features

    def _seen(self, images: Images) -> list[torch.Tensor]:
        """The same, as the tower gives it."""
        weight = next(self._tower.parameters())
        patches = torch.from_numpy(images.patches).to(weight.device, weight.dtype)
        seen = self._tower(
            patches, grid_thw=torch.from_numpy(images.grids).to(weight.device), return_dict=True
        )
        return [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())]

    def _finish(self) -> None:
        """The backward passes of the tower, for all features that were cut off."""
        while self._cut:
            images, features = self._cut.pop(0)
            came = [feature.grad for feature in features]
            if any(gradient is not None for gradient in came):
                torch.autograd.backward(self._seen(images), came)


class _Hook:
    """Puts features into the output of one module.

    Attributes:
        now: what goes into the current forward pass; None: nothing.
        within: whether a forward pass is under way.
        later: what went into passes whose layers will be computed again.
    """

    def __init__(self, *, add: bool) -> None:
        self.add, self.within = add, False
        self.now: _Placed | None = None
        self.later: deque[_Placed | None] = deque()

    def of(self, hidden: torch.Tensor) -> torch.Tensor:
        """The module's output [T, B, hidden] with the features."""
        placed = self.now if self.within else self.later.popleft()
        return hidden if placed is None else placed.put_into(hidden, add=self.add)


def _laid_out(
    images: Images, lengths: np.ndarray[Any, np.dtype[np.int64]] | None, multiple: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The places of tokens in the layout of their pass, int64 [3, T, B]; a packed one has one row."""
    placed = images.places
    if lengths is not None:
        placed = placed[:, np.arange(placed.shape[2]) < lengths[:, None]][:, None]
    more = ((0, 0), (0, 0), (0, -placed.shape[2] % multiple))
    return np.pad(placed, more).transpose(0, 2, 1)
