"""Dealing experts to ranks by load: copies for the hottest, then the heaviest first onto the lightest.

The method is that of DeepSeek's expert-parallel load balancer: extra copies go one by one to the expert whose copies
carry most; copies are then packed, heaviest first, onto the lightest node that has room, and inside a node onto the
lightest slot. Copies of one expert avoid one another where they can. Each copy is taken to serve its even share.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from shard_plans.placement.experts import Slots


def replicate(counts: Sequence[float], extra: int, most: int) -> list[int]:
    """Copies of each expert: one, and `extra` more where a copy carries most, but no expert has over `most`."""
    copies = [1] * len(counts)
    heap = [(-count, expert) for expert, count in enumerate(counts)]
    heapq.heapify(heap)
    for _ in range(min(extra, (most - 1) * len(counts))):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < most:
            heapq.heappush(heap, (-counts[expert] / copies[expert], expert))
    return copies


def deal(counts: Sequence[float], slots: int, extra: int, nodes: int = 1) -> Slots:
    """Expert ids of each slot, balanced by load over `nodes` (which divide the slots) and over slots.

    All slots hold the same number, or the first ones one more. No expert has more copies than there are slots.
    """
    copies = replicate(counts, extra, slots)
    items = sorted(
        ((counts[expert] / number, expert) for expert, number in enumerate(copies) for _ in range(number)),
        key=lambda item: (-item[0], item[1]),
    )
    room = [_part(len(items), slots, slot) for slot in range(slots)]
    each = slots // nodes
    node_room = [sum(room[node * each : (node + 1) * each]) for node in range(nodes)]
    found: list[tuple[int, ...]] = []
    for node, held in enumerate(_pack(items, node_room)):
        found += [tuple(sorted(ids for _, ids in slot)) for slot in _pack(held, room[node * each : (node + 1) * each])]
    return tuple(found)


def imbalance(counts: Sequence[float], slots: Slots) -> float:
    """Load of the busiest slot over the mean; 1 is even."""
    copies = [0] * len(counts)
    for ids in slots:
        for expert in ids:
            copies[expert] += 1
    loads = [sum(counts[expert] / copies[expert] for expert in ids) for ids in slots]
    return max(loads) * len(loads) / sum(loads)


def _part(items: int, slots: int, slot: int) -> int:
    return items // slots + (slot < items % slots)


def _pack(items: Sequence[tuple[float, int]], room: Sequence[int]) -> list[list[tuple[float, int]]]:
    """Items, heaviest first, each onto the lightest bin that has room and, where there is one, no copy of it yet."""
    bins: list[list[tuple[float, int]]] = [[] for _ in room]
    held: list[set[int]] = [set() for _ in room]
    heap = [(0.0, number) for number, free in enumerate(room) if free]
    for item in items:
        passed = []
        while heap and item[1] in held[heap[0][1]]:
            passed.append(heapq.heappop(heap))
        chosen = heapq.heappop(heap) if heap else passed.pop(0)
        load, number = chosen
        bins[number].append(item)
        held[number].add(item[1])
        for back in passed:
            heapq.heappush(heap, back)
        if len(bins[number]) < room[number]:
            heapq.heappush(heap, (load + item[0], number))
    return bins
