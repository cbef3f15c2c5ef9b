"""Shares out samples so that forward passes are of about equal work. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def balanced(work: Sequence[int], parts: int) -> list[list[int]]:
    """Places of the items in `parts` parts whose sums of work are about equal; parts may be empty.

    The largest differencing method (Karmarkar and Karp 1982): each item begins as a partition of its own,
    and the two partitions whose parts differ most are joined, the heaviest part of one with the lightest of
    the other. Ties are decided by place.

    Returns:
        Parts by their first place, empty ones last; the places of each in order.
    """
    none: list[tuple[int, list[int]]] = [(0, [])] * (parts - 1)
    heap = [(-of, place, [(of, [place]), *none]) for place, of in enumerate(work)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, one = heapq.heappop(heap)
        _, second, other = heapq.heappop(heap)
        joined = [(a + b, [*held, *more]) for (a, held), (b, more) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], min(first, second), joined))
    found = [sorted(places) for _, places in heap[0][2]] if heap else []
    found += [[] for _ in range(parts - len(found))]
    return sorted(found, key=lambda places: (not places, places))


def evenly(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """The items in order, in `parts` parts of as equal size as can be; the first ones are the larger."""
    each, more = divmod(len(items), parts)
    ends = [at * each + min(at, more) for at in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(ends)]


def packs(lengths: Sequence[int], work: Sequence[int], most: int, least: int = 1) -> list[list[int]]:
    """Places of the items in few parts of at most `most` tokens each, of about equal work.

    An item that is longer is a part of its own.

    Args:
        lengths: tokens of each item.
        least: number of parts, where there are so many items.
    """
    if not lengths:
        return []
    count = min(max(-(-sum(lengths) // most), least), len(lengths))
    while True:
        parts = [part for part in balanced(work, count) if part]
        fullest = max((sum(lengths[i] for i in part) for part in parts if len(part) > 1), default=0)
        if fullest <= most:
            return parts
        count = min(max(count + 1, count * fullest // most), len(lengths))


def packs_of_ranks(
    lengths: Sequence[int], work: Sequence[int], most: int, ranks: int
) -> list[list[list[int]]]:
    """Places of the items by rank, of about equal work, and for each rank in parts as of `packs`: as many on
    every rank that has so many items."""
    places = balanced(work, ranks) if ranks > 1 else [list(range(len(lengths)))]
    least, found = 1, list[list[list[int]]]()
    while True:
        found = [packs([lengths[i] for i in own], [work[i] for i in own], most, least) for own in places]
        fullest = max(map(len, found), default=0)
        if all(
            len(parts) == fullest or len(parts) == len(own) for parts, own in zip(found, places, strict=True)
        ):
            break
        least = fullest
    return [[[own[i] for i in part] for part in parts] for parts, own in zip(found, places, strict=True)]
