"""Rows of a family table: `stored name: role [shape] flags`, under a section that says where they apply."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shard_plans.errors import FamilyError
from shard_plans.families.dims import Dim, parse_dim

DTYPE_FLAGS = ("F32", "BF16", "F16", "I64")
STAGES = ("first", "layer", "last", "vision")
_ROLE = re.compile(r"[a-z_]+(\.[A-Za-z_0-9]+)*")
_SECTION = re.compile(
    r"(?P<stage>[a-z]+)(?P<which> mtp| running)?(?: (?P<kind>[a-z_]+)=(?P<value>[a-z_0-9]+))?"
    r"(?: if (?P<condition>[^()]+))?(?: \([a-z ]+\))?"
)
MOST_DIMS = 8
HOLE = re.compile(r"\{([a-z]+)\}")


@dataclass(frozen=True, slots=True)
class Section:
    """Where rows or block words apply: a stage, all its layers, one layer kind, or the MTP layers alone."""

    stage: str
    """first, layer, last, or vision (which lies on the first stage)."""
    mtp: bool = False
    kind: tuple[str, str] | None = None
    condition: str | None = None
    """The section exists only where this expression holds."""
    forward: bool = False
    """Only layers that run are meant: those for multi-token prediction have names of their own."""

    def applies(self, kinds: Mapping[str, str], mtp: bool) -> bool:
        """Whether a layer with these kinds is meant."""
        return not (self.forward if mtp else self.mtp) and (
            self.kind is None or kinds.get(self.kind[0]) == self.kind[1]
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One stored name, or one a layer and expert."""

    name: str
    """Stored name with the holes {layer} and {expert}, or one that the table names ({block}); {mtp} in the place of
    {layer} counts the layers for multi-token prediction alone.
    """
    role: str
    section: Section
    dims: tuple[Dim, ...]
    quant: bool | str = False
    """May be stored in the config's quantised format; `swapped`: with the last two dimensions exchanged then."""
    bias: bool | str = False
    """Has a bias under NAME.bias: always, never, or when the expression holds."""
    condition: str | None = None
    """Must be stored when this expression holds, must not otherwise."""
    optional: bool = False
    tied: str | None = None
    """Role whose tensor serves when this one isn't stored."""
    dtype: str | None = None
    """The only type that is accepted."""
    usual: str | None = None
    """The type that counts where there is only a config.json; others are accepted too."""

    @property
    def group(self) -> str:
        """The role's first word: attn, mlp, experts, ..."""
        return self.role.partition(".")[0]

    @property
    def per_expert(self) -> bool:
        """Whether the stored name has a hole for the expert number."""
        return "{expert}" in self.name

    @property
    def stacked(self) -> bool:
        """Whether one stored tensor holds all experts, one after the other."""
        return self.dims[0].stacks

    @property
    def hole(self) -> str | None:
        """The name's hole that is neither {layer} nor {expert}: the blocks of a tower are counted in it."""
        return next((hole for hole in HOLE.findall(self.name) if hole not in ("layer", "mtp", "expert")), None)

    def name_at(self, index: int | None, running: int) -> str:
        """The stored name in layer or block `index`, {expert} kept; `running` layers come before those for MTP."""
        if self.section.stage == "layer" and index is not None:
            return self.name.replace("{layer}", str(index)).replace("{mtp}", str(index - running))
        return self.name.replace(f"{{{self.hole}}}", str(index))


def parse_section(text: str) -> Section:
    """`layer ffn=moe` -> Section; FamilyError where it can't be read."""
    match = _SECTION.fullmatch(text)
    if match is None or match["stage"] not in STAGES:
        raise FamilyError(
            f"section {text!r}: write first, last, vision, or layer, `layer mtp`, `layer running`, perhaps KIND=VALUE, "
            f"then `if EXPR`"
        )
    kind = (match["kind"], match["value"]) if match["kind"] else None
    which = match["which"]
    return Section(match["stage"], which == " mtp", kind, match["condition"], which == " running")


def parse_row(name: str, text: str, section: Section, prefix: str, own_names: bool = False) -> Row:
    """One line of a table. Layer sections get the prefix before the name.

    `own_names`: of layers for multi-token prediction: with the hole {mtp} or, where there is but one, with none.
    """
    head, bracket, rest = text.partition("[")
    shape, closed, flags = rest.partition("]")
    role = head.strip()
    if not bracket or not closed or not _ROLE.fullmatch(role):
        raise FamilyError(f"row {name!r}: {text!r} isn't `role [dim, dim] flags`")
    if role.split(".")[0] == "layers":
        raise FamilyError(f"row {name!r}: a role can't begin with `layers`, as the shards' layers do")
    dims = tuple(parse_dim(dim) for dim in shape.split(","))
    if len(dims) > MOST_DIMS:
        raise FamilyError(f"row {name!r} has {len(dims)} dimensions; at most {MOST_DIMS} are possible")
    if any(mark[0] == "ep" for dim in dims for mark in dim.marks):
        others = [mark for dim in dims[1:] for mark in dim.marks if mark[0] == "ep"]
        if not dims[0].stacks or others or "{expert}" in name or len(dims) == 1:
            raise FamilyError(f"row {name!r}: ep(experts) is the whole first dimension of stacked experts")
    axes = [axis for dim in dims for axis in sorted({mark[0] for mark in dim.marks})]
    if len(axes) != len(set(axes)):
        raise FamilyError(f"row {name!r}: two dimensions are cut along {axes[0]}; its ranks would not cover the tensor")
    row: dict[str, object] = {}
    for word, argument in _flags(flags, name):
        if word in ("quant", "optional", "bias") and argument is None:
            row[word] = True
        elif (word, argument) == ("quant", "swapped"):
            row[word] = argument
        elif word in ("bias", "if", "tied") and argument:
            row["condition" if word == "if" else word] = argument
        elif word in DTYPE_FLAGS and argument is None:
            row["dtype"] = word
        elif word.removesuffix("?") in DTYPE_FLAGS and argument is None:
            row["usual"] = word.removesuffix("?")
        else:
            known = "quant, quant(swapped), bias, bias(EXPR), if(EXPR), optional, tied(ROLE), TYPE, TYPE? of "
            known += ", ".join(DTYPE_FLAGS)
            raise FamilyError(f"row {name!r}: unknown flag {word!r}; known: {known}")
    if any(dim.unstated for dim in dims) and (row.get("quant") or not row.get("optional")):
        raise FamilyError(f"row {name!r}: `any` is for optional rows that aren't quantised; a config can't count them")
    if row.get("quant") and len(dims) - dims[0].stacks < 2:
        raise FamilyError(f"row {name!r}: only a row of two dimensions or more can be quantised")
    stored = prefix + name if section.stage == "layer" else name
    if ("{layer}" in stored) != (section.stage == "layer" and not own_names):
        raise FamilyError(f"row {name!r}: the hole {{layer}} belongs in rows of a layer section, and only there")
    return Row(stored, role, section, dims, **row)  # type: ignore[arg-type]


def _flags(text: str, name: str) -> list[tuple[str, str | None]]:
    words: list[tuple[str, str | None]] = []
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        start = at
        while at < len(text) and not text[at].isspace() and text[at] != "(":
            at += 1
        word, argument = text[start:at], None
        if at < len(text) and text[at] == "(":
            depth, opened = 1, at + 1
            while depth and at + 1 < len(text):
                at += 1
                depth += {"(": 1, ")": -1}.get(text[at], 0)
            if depth:
                raise FamilyError(f"row {name!r}: a parenthesis isn't closed in {text.strip()!r}")
            argument = text[opened:at]
            at += 1
        words.append((word, argument))
    return words


def bias_row(row: Row) -> Row:
    """The bias that `row` announces: NAME.bias, cut like the output; whole where only the input is cut."""
    stem = row.name.removesuffix(".weight")
    if stem == row.name or row.stacked:
        raise FamilyError(f"row {row.name!r}: `bias` needs a row whose name ends in .weight, and no stacked experts")
    condition = row.bias if isinstance(row.bias, str) else None
    return Row(stem + ".bias", row.role + ".bias", row.section, row.dims[:1], condition=condition)
