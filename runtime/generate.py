"""Greedy generation over the same ranks: prompts through the cache, then token after token, all sequences at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.blocks.images import Images
from runtime.blocks.piece import Caches
from runtime.passes import RankRun, Watcher, batch_pass, next_piece


@dataclass(slots=True, eq=False)
class Answer:
    """One sequence: its prompt, what was added to it, and what the passes through its cache said."""

    ids: Tensor
    """The prompt [tokens]."""
    caches: Caches
    shift: int = 0
    """How far images of the prompt move the places of what comes behind it."""
    tokens: list[int] = field(default_factory=list)
    """What was generated; the same on every rank."""
    scores: dict[int, Tensor | None] = field(default_factory=dict)
    """Position of the last token of each pass -> its logits [vocabulary]; None but on a replica's output rank."""
    seen: int = 0
    """Tokens that passes ran: at the end all but the last one generated."""
    ended: bool = False
    """Nothing more is added; the blocks of the cache were given back."""

    @property
    def whole(self) -> Tensor:
        """The prompt and what was added to it."""
        return torch.cat([self.ids, torch.tensor(self.tokens, dtype=self.ids.dtype, device=self.ids.device)])


@dataclass(slots=True, eq=False)
class Generation:
    """Several answers that are worked on at once, by every rank alike."""

    run: RankRun
    answers: Sequence[Answer]
    watch: Watcher | None = None
    """Sees every pass."""
    images: Images | None = None
    """Of the only prompt, which one pass takes."""
    ran: list[tuple[int, int]] = field(default_factory=list)
    """(answer, position) of every row of those passes, in the order in which they ran."""
    most: int = 0
    """The most bytes that the caches of this rank held."""

    def prefill(self, chunk: int | None) -> None:
        """Fill the caches with all prompts, `chunk` tokens a pass at most."""
        for parts in chunks([len(answer.ids) for answer in self.answers], chunk):
            ids = [(number, self.answers[number].ids[start:stop], start) for number, start, stop in parts]
            self._pass(ids, self.images)

    def generate(self, count: int, ends: AbstractSet[int]) -> None:
        """Up to `count` tokens behind each prompt; an answer ends behind a token of `ends`."""
        for _ in range(count):
            active = [number for number, answer in enumerate(self.answers) if not answer.ended]
            if not active:
                break
            chosen = self._choose(active)
            for number, token in zip(active, chosen.tolist(), strict=True):
                answer = self.answers[number]
                answer.tokens.append(int(token))
                if answer.tokens[-1] in ends or len(answer.tokens) == count:
                    self._end(answer)
            going = [row for row, number in enumerate(active) if not self.answers[number].ended]
            self._pass([(active[row], chosen[row : row + 1], self.answers[active[row]].seen) for row in going])

    def _choose(self, active: Sequence[int]) -> Tensor:
        """The likeliest next token of each active answer, on all ranks."""
        ctx, best = self.run.ctx, None
        if ctx.at.rank == self.run.output_rank:
            last = [self.answers[number].scores[self.answers[number].seen - 1] for number in active]
            best = torch.stack([scores for scores in last if scores is not None]).argmax(-1)
        chosen = ctx.comm.broadcast(best, self.run.output_rank, (len(active),), torch.int64)
        return chosen.to(ctx.device)

    def _pass(self, parts: Sequence[tuple[int, Tensor, int]], images: Images | None = None) -> None:
        """Run ids of some answers from a position on, with the images among them."""
        if not parts:
            return
        pieces, rows = [], list[int]()
        for number, ids, start in parts:
            answer = self.answers[number]
            positions = torch.arange(start, start + len(ids), device=ids.device)
            shift = 0 if images is not None else answer.shift
            pieces.append(next_piece(self.run, ids, positions, answer.caches, images, shift))
            self.ran += [(number, position) for position in range(start, start + len(ids))]
            rows.append((rows[-1] if rows else -1) + len(ids))
        known = torch.tensor(rows, device=pieces[0].positions.device)
        scores = batch_pass(self.run, pieces, self.watch, images, known)
        mine = scores if self.run.gives_scores else None
        for row, (number, ids, start) in enumerate(parts):
            answer = self.answers[number]
            answer.seen = start + len(ids)
            answer.scores[answer.seen - 1] = None if mine is None else mine[row]
        self._measure()

    def _measure(self) -> None:
        """Note how many bytes the caches hold now."""
        held = sum(cache.nbytes for answer in self.answers for cache in answer.caches.values())
        self.most = max(self.most, held)

    def _end(self, answer: Answer) -> None:
        answer.ended = True
        for cache in answer.caches.values():
            cache.free()


def chunks(lengths: Sequence[int], most: int | None) -> Iterator[list[tuple[int, int, int]]]:
    """Passes over prompts of these lengths, of `most` tokens each at most: (prompt, start, stop) of their pieces.

    Prompts are taken in order; a pass may hold the end of one and the beginning of others.
    """
    parts, room = list[tuple[int, int, int]](), most
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = length if room is None else min(length, start + room)
            parts.append((number, start, stop))
            if room is not None:
                room -= stop - start
            start = stop
            if room == 0:
                yield parts
                parts, room = [], most
    if parts:
        yield parts
