"""Dimensions of family tables: row-major products whose marked factor is dealt to ranks.

`tp(heads)*(nope+rope)` is whole heads, `2*etp(ffn)` is [gate | up] halves, `etp(ffn)*2` interleaved pairs. Factors are
written slowest first; parts of a sum lie one after the other; `+ zeros` at the end is a tail of zeros, `+ zeros(SIZE)`
one that makes the dimension SIZE long; `any` is as long as the header says. A dimension is read once and answers two
questions: how long it is, and which runs of it a rank takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shard_plans.errors import FamilyError, GridError

AXES = ("tp", "ep", "etp")
_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z_0-9]*|[0-9]+|[()*+])")
_MAX_RUNS = 1 << 16
MOST_WORDS = 100
"""Names, numbers and signs of one dimension."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A number, a size, a size dealt to an axis, or a sum in parentheses."""

    number: int | None = None
    size: str | None = None
    axis: str | None = None
    inner: Dim | None = None


@dataclass(frozen=True, slots=True)
class Dim:
    """A sum of products."""

    terms: tuple[tuple[Factor, ...], ...]
    text: str
    zeros: bool = False
    """Stored longer than the terms say: a tail that must be all zero and that no rank holds."""
    whole: str | None = None
    """The size that the dimension has with its zeros, by the config; a header, where there is one, decides."""
    unstated: bool = False
    """As long as the header says: only a header settles it."""

    def factors(self) -> Iterator[Factor]:
        """Every factor that is a number or a size, parentheses opened."""
        for term in self.terms:
            for factor in term:
                if factor.inner is None:
                    yield factor
                else:
                    yield from factor.inner.factors()

    @property
    def stacks(self) -> bool:
        """Whether this is `ep(SIZE)` alone: the experts of a stacked tensor."""
        return len(self.terms) == 1 and len(self.terms[0]) == 1 and self.terms[0][0].axis == "ep"

    @property
    def marks(self) -> frozenset[tuple[str, str]]:
        """(axis, size) of each dealt factor."""
        return frozenset((f.axis, f.size) for f in self.factors() if f.axis and f.size)


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of an axis a rank takes: member `index` of `count`."""

    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Taken:
    """What a rank takes of a dimension."""

    runs: tuple[tuple[int, int], ...]
    """Half-open ranges of the stored dimension, ascending."""
    length: int
    """Extent in the target; more than the runs hold where a size is padded."""


def parse_dim(text: str) -> Dim:
    """Read a dimension; FamilyError where it leaves the grammar."""
    tokens: list[str] = []
    at = 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if len(tokens) == MOST_WORDS:
            raise FamilyError(f"dimension {text[:60]!r}... has more than {MOST_WORDS} words")
        if match is None:
            raise FamilyError(f"dimension {text!r} can't be read at {text[at:]!r}")
        tokens.append(match[1])
        at = match.end()
    if tokens == ["any"]:
        return Dim((), text, unstated=True)
    whole = tokens[-2] if tokens[-5:-2] == ["+", "zeros", "("] and tokens[-1] == ")" else None
    end = len(tokens) - (5 if whole is not None else 2)
    zeros = tokens[end : end + 2] == ["+", "zeros"]
    dim, rest = _sum(tokens[:end] if zeros else tokens, text, 0)
    if rest:
        raise FamilyError(f"dimension {text!r} can't be read at {''.join(rest)!r}")
    if any(factor.size == "zeros" for factor in dim.factors()):
        raise FamilyError(f"dimension {text!r}: `zeros` stands alone, as the last part of a sum")
    if any(factor.size == "any" for factor in dim.factors()):
        raise FamilyError(f"dimension {text!r}: `any` stands alone")
    return replace(dim, zeros=zeros, whole=whole)


def _sum(tokens: list[str], text: str, depth: int) -> tuple[Dim, list[str]]:
    if depth > 4:
        raise FamilyError(f"dimension {text!r} nests too deeply")
    terms = []
    while True:
        factors = []
        while True:
            factor, tokens = _factor(tokens, text, depth)
            factors.append(factor)
            if tokens[:1] != ["*"]:
                break
            tokens = tokens[1:]
        marked = [axis for f in factors for axis in ({m[0] for m in f.inner.marks} if f.inner else {f.axis} - {None})]
        if len(marked) != len(set(marked)):
            raise FamilyError(
                f"dimension {text!r} cuts one product twice along {marked[0]}; its ranks would not cover it"
            )
        terms.append(tuple(factors))
        if tokens[:1] != ["+"]:
            return Dim(tuple(terms), text), tokens
        tokens = tokens[1:]


def _factor(tokens: list[str], text: str, depth: int) -> tuple[Factor, list[str]]:
    if not tokens:
        raise FamilyError(f"dimension {text!r} ends too early")
    head, rest = tokens[0], tokens[1:]
    if head == "(":
        inner, rest = _sum(rest, text, depth + 1)
        if rest[:1] != [")"]:
            raise FamilyError(f"dimension {text!r} lacks a closing parenthesis")
        return Factor(inner=inner), rest[1:]
    if head.isdigit():
        if len(head) > 9:
            raise FamilyError(f"dimension {text!r}: {head} is too large")
        return Factor(number=int(head)), rest
    if head[0].isalpha() or head[0] == "_":
        if rest[:1] == ["("]:
            if head not in AXES or len(rest) < 3 or rest[2] != ")" or not rest[1].isidentifier():
                raise FamilyError(f"dimension {text!r}: write AXIS(size) with an axis of {', '.join(AXES)}")
            return Factor(size=rest[1], axis=head), rest[3:]
        return Factor(size=head), rest
    raise FamilyError(f"dimension {text!r} can't be read at {head!r}")


def settled(dim: Dim, length: int) -> Dim:
    """The dimension, of the length that the header says where the table doesn't."""
    return Dim(((Factor(number=length),),), str(length)) if dim.unstated else dim


def extent(dim: Dim, sizes: Mapping[str, int]) -> int:
    """Length of the dimension in elements; FamilyError for a size that the table doesn't define."""
    total = 0
    for term in dim.terms:
        product = 1
        for factor in term:
            product *= _count(factor, sizes, dim.text)
        total += product
    return total


def stored_extent(dim: Dim, sizes: Mapping[str, int]) -> int:
    """Length of the dimension with its tail of zeros, as far as the table tells it."""
    length = extent(dim, sizes)
    return length if dim.whole is None else max(length, _count(Factor(size=dim.whole), sizes, dim.text))


def _count(factor: Factor, sizes: Mapping[str, int], text: str) -> int:
    if factor.number is not None:
        return factor.number
    if factor.inner is not None:
        return extent(factor.inner, sizes)
    if factor.size is None or factor.size not in sizes:
        raise FamilyError(f"dimension {text!r} names the size {factor.size!r}, which the table doesn't define")
    return sizes[factor.size]


def take(dim: Dim, sizes: Mapping[str, int], uneven: Mapping[str, str], shares: Mapping[str, Share]) -> Taken:
    """The runs that a rank takes. Axes without a share are not cut. GridError where a size doesn't divide."""
    runs: list[tuple[int, int]] = []
    start = length = 0
    for term in dim.terms:
        taken, whole = _take_product(term, sizes, uneven, shares, dim.text)
        for first, last in taken.runs:
            if runs and runs[-1][1] == start + first:
                runs[-1] = (runs[-1][0], start + last)
            else:
                runs.append((start + first, start + last))
        start, length = start + whole, length + taken.length
    return Taken(tuple(runs), length)


def _take_product(
    term: tuple[Factor, ...],
    sizes: Mapping[str, int],
    uneven: Mapping[str, str],
    shares: Mapping[str, Share],
    text: str,
) -> tuple[Taken, int]:
    runs: tuple[tuple[int, int], ...] = ((0, 1),)
    length = whole = 1
    for factor in reversed(term):
        count = _count(factor, sizes, text)
        if factor.inner is not None:
            outer = take(factor.inner, sizes, uneven, shares)
        elif factor.axis is not None and factor.size is not None and factor.axis in shares:
            outer = take_size(factor.size, count, uneven.get(factor.size, "refuse"), factor.axis, shares[factor.axis])
        else:
            outer = Taken(((0, count),) if count else (), count)
        if runs == ((0, whole),):
            runs = tuple((start * whole, stop * whole) for start, stop in outer.runs)
        else:
            if sum(stop - start for start, stop in outer.runs) * len(runs) > _MAX_RUNS:
                raise FamilyError(f"dimension {text!r} falls into more than {_MAX_RUNS} runs; put the cut factor first")
            picked = [index for start, stop in outer.runs for index in range(start, stop)]
            runs = tuple((index * whole + start, index * whole + stop) for index in picked for start, stop in runs)
        length, whole = length * outer.length, whole * count
    return Taken(runs, length), whole


def take_size(name: str, size: int, rule: str, axis: str, share: Share) -> Taken:
    """What member `share` takes of a size, by the table's rule for sizes that don't divide."""
    index, count = share.index, share.count
    if rule.startswith(("pad", "round")):
        part = padded(size, rule, count) // count
        if part * count % int(rule.split()[1]) and rule.startswith("round"):
            raise GridError(f"{axis} {count} doesn't divide {name} {size}, padded to {padded(size, rule, 1)}")
        run = (min(index * part, size), min((index + 1) * part, size))
        return Taken((run,) if run[0] < run[1] else (), part)
    if size % count == 0:
        part = size // count
        return Taken(((index * part, (index + 1) * part),), part)
    if rule == "whole":
        return Taken(((0, size),), size)
    if rule == "repeat" and count % size == 0:
        unit = index // (count // size)
        return Taken(((unit, unit + 1),), 1)
    raise GridError(f"{axis} {count} doesn't divide {name} {size}")


def padded(size: int, rule: str, count: int) -> int:
    """The size after `pad N`: the next multiple of N x count, unless `count` divides it already.

    After `round N`: the next multiple of N, whatever `count` is; only layouts of engines ask for it.
    """
    if rule.startswith("round"):
        return -(-size // int(rule.split()[1])) * int(rule.split()[1])
    multiple = int(rule.split()[1]) * count
    return size if size % count == 0 else -(-size // multiple) * multiple


def divides(size: int, rule: str, count: int) -> bool:
    """Whether `count` ranks can share `size` under the table's rule."""
    return size % count == 0 or rule.startswith("pad") or rule == "whole" or (rule == "repeat" and count % size == 0)
