"""Family tables: one YAML file an architecture, found by config.model_type or given by the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shard_plans.documents.yaml_text import check_schema, dump_yaml, load_yaml
from shard_plans.errors import FamilyError
from shard_plans.families.rows import Row, Section, parse_row, parse_section
from shard_plans.families.schema import FAMILY_SCHEMA

FOLDER = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: what is stored, how large, how it is cut, which blocks read it."""

    name: str
    match: tuple[str, ...]
    """Values of config.model_type."""
    expect: Mapping[str, tuple[Any, ...]]
    """Config keys (`.nested` too) that may be absent, but if present must hold one of these values."""
    defaults: Mapping[str, Any]
    """What a config means that lacks the key."""
    sizes: Mapping[str, Any]
    """Size -> expression, or a list of alternatives."""
    uneven: Mapping[str, str]
    """Size -> rule when ranks don't divide it; refuse is the default."""
    count: Any
    """Expression for the number of layers."""
    mtp: Mapping[str, Any]
    """`count` (an expression) and kinds of the multi-token-prediction layers; empty where there are none. Where they
    have names of their own, their `prefix`, and `layer`, put behind it in the rows that other layers have too.
    """
    kinds: Mapping[str, Mapping[str, Any]]
    """Layer kind -> value -> condition (`else` last)."""
    rows: tuple[Row, ...]
    """In execution order."""
    blocks: tuple[tuple[Section | None, Mapping[str, Any]], ...]
    """Words for the model (None) or a section; later ones win."""
    text: str | None
    """The config section of the language model: keys are looked up there first, then at the root.

    With `?` behind it a config may lack it, and is all of the language model then.
    """
    stored: str | None
    """The only type of plain rows that don't state one."""
    holes: Mapping[str, str]
    """Hole of stored names, other than layer and expert -> the size that counts it."""
    undescribed: Mapping[str, str]
    """Config key -> what is stored where it is set and the table has no rows for."""
    formats: tuple[str, ...]
    """The only quantised formats (_formats.yaml) that may be stored; empty: any that the config names."""
    document: str
    """The resolved table as YAML: what `extends` took over is written out."""


def known_families() -> dict[str, str]:
    """model_type -> table name, for all bundled tables."""
    found: dict[str, str] = {}
    for path in sorted(FOLDER.glob("[a-z]*.yaml")):
        data, _ = load_yaml(path, f"family table {path.stem}")
        for model_type in data["match"]:
            if model_type in found:
                raise FamilyError(
                    f"model_type {model_type!r} is claimed by the tables {found[model_type]} and {path.stem}"
                )
            found[model_type] = path.stem
    return found


def load_family(config: Mapping[str, Any], path: Path | None = None) -> Family:
    """The table for this config: the user's own file, or the bundled one that matches config.model_type.

    Raises FamilyError where no table matches (the known ones are listed) or the file is malformed.
    """
    if path is not None:
        return parse_family(_resolve(path))
    model_type = config.get("model_type")
    known = known_families()
    if not isinstance(model_type, str) or model_type not in known:
        raise FamilyError(
            f"config.json: model_type {model_type!r} is an unknown architecture; known: {', '.join(sorted(known))}. "
            f"Describe its tensors in a table of your own (docs/families.md, Writing a table) and pass that with "
            f"--family FILE"
        )
    return parse_family(_resolve(FOLDER / f"{known[model_type]}.yaml"))


def read_family(path: Path) -> Family:
    """A table file by itself, whatever model_type it matches."""
    return parse_family(_resolve(path))


def _resolve(path: Path, depth: int = 0) -> dict[str, Any]:
    """The table as a dictionary, with everything that it extends merged in. Checked against the schema."""
    data, lines = load_yaml(path, f"family table {path.name}")
    check_schema(data, FAMILY_SCHEMA, lines, f"family table {path.name}", FamilyError)
    table: dict[str, Any] = data
    parent = table.pop("extends", None)
    if parent is None:
        return table
    if depth > 8:
        raise FamilyError(f"family table {path.name}: `extends` is nested more than 8 times")
    found = next((p for p in (path.parent / f"{parent}.yaml", FOLDER / f"{parent}.yaml") if p.is_file()), None)
    if found is None:
        raise FamilyError(f"family table {path.name} extends {parent!r}, which is neither beside it nor bundled")
    merged = _merge(_renamed(_resolve(found, depth + 1), table.pop("rename", {})), table, path.name)
    merged["family"], merged["match"] = table["family"], table["match"]
    return merged


def _renamed(base: dict[str, Any], prefixes: Mapping[str, str]) -> dict[str, Any]:
    """The table with other beginnings of stored names; a name takes the first that fits."""

    def renamed(name: str) -> str:
        old = next((old for old in prefixes if name.startswith(old)), "")
        return prefixes[old] + name[len(old) :] if old else name

    if not prefixes:
        return base
    sections = {
        section: rows if section.startswith("layer") else {renamed(name): row for name, row in rows.items()}
        for section, rows in base["tensors"].items()
    }
    return {**base, "prefix": renamed(base["prefix"]), "tensors": sections}


def _merge(base: dict[str, Any], change: dict[str, Any], where: str, trail: str = "") -> dict[str, Any]:
    """Replace by key, sections key by key; null removes, and removing what isn't there is an error."""
    merged = dict(base)
    for key, value in change.items():
        if value is None:
            if key not in merged:
                raise FamilyError(f"family table {where}: {trail}{key} is removed, but the table it extends has none")
            del merged[key]
        elif isinstance(value, dict) and isinstance(merged.get(key), dict) and _is_section(trail, key):
            merged[key] = _merge(merged[key], value, where, f"{trail}{key} / ")
        else:
            merged[key] = value
    return merged


def _is_section(trail: str, key: str) -> bool:
    """Whether the dictionary under this key is merged key by key (rather than replaced as one value)."""
    if not trail:
        return key in ("expect", "defaults", "sizes", "uneven", "layers", "tensors", "blocks", "holes")
    return trail in ("tensors / ", "blocks / ")


def _rows(name: str, text: str, section: Section, prefix: str, mtp: Mapping[str, Any]) -> list[Row]:
    """A line of the table as rows: two where layers for multi-token prediction have names of their own."""
    if section.stage != "layer" or section.forward or "prefix" not in mtp:
        return [parse_row(name, text, section, prefix)]
    if section.mtp:
        return [parse_row(name, text, section, mtp["prefix"], own_names=True)]
    apart = parse_row(name, text, replace(section, mtp=True), mtp["prefix"] + mtp.get("layer", ""), own_names=True)
    return [parse_row(name, text, replace(section, forward=True), prefix), apart]


def parse_family(table: dict[str, Any]) -> Family:
    """A resolved table -> Family. Raises FamilyError for a row, section or word that can't be read."""
    layers = dict(table["layers"])
    if "count" not in layers:
        raise FamilyError(f"family {table['family']}: layers lacks `count`, the number of layers")
    count, mtp = layers.pop("count"), layers.pop("mtp", {})
    rows: list[Row] = []
    for text, section_rows in table["tensors"].items():
        section = parse_section(text)
        for name, row in section_rows.items():
            if row is not None:
                rows += _rows(name, row, section, table["prefix"], mtp)
    for kind, values in layers.items():
        if not isinstance(values, dict):
            raise FamilyError(f"family {table['family']}: layers / {kind} lists no values")
    for row in rows:
        if row.hole is not None and row.hole not in table.get("holes", {}):
            raise FamilyError(
                f"family {table['family']}: row {row.name!r} has the hole {row.hole}, which `holes` lacks"
            )
        if (row.per_expert or row.stacked) and "experts" not in table["sizes"]:
            raise FamilyError(
                f"family {table['family']}: row {row.name!r} has experts, of which `sizes` says no number"
            )
        if row.section.kind is not None and row.section.kind[1] not in layers.get(row.section.kind[0], {}):
            raise FamilyError(f"family {table['family']}: row {row.name!r} is in a section of an undefined layer kind")
    roles = [row.role for row in rows if row.section.stage in ("first", "last")]
    if roles.count("embed") != 1 or roles.count("norm") != 1 or roles.count("head") != 1:
        raise FamilyError(f"family {table['family']}: there must be one row each of the roles embed, norm and head")
    for text, words in table["blocks"].items():
        if words is None:
            raise FamilyError(
                f"family {table['family']}: blocks / {text} is removed, but no table that it extends has it"
            )
    blocks = tuple((None if text == "model" else parse_section(text), words) for text, words in table["blocks"].items())
    expect = {key: tuple(values) for key, values in table.get("expect", {}).items()}
    return Family(
        table["family"], tuple(table["match"]), expect, table.get("defaults", {}), table["sizes"],
        table.get("uneven", {}), count, mtp, layers, tuple(rows), blocks, table.get("text"), table.get("stored"),
        table.get("holes", {}), table.get("undescribed", {}), tuple(table.get("formats", ())), dump_yaml(table),
    )  # fmt: skip
