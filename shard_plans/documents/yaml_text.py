"""Strict YAML documents: read with line numbers, checked against a schema, written so that they read back the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from shard_plans.checkpoints.headers import brief
from shard_plans.errors import FamilyError, ReshardError

SIZE_LIMIT = 16_000_000
DEPTH_LIMIT = 32
MOST_FAULTS = 100
"""Departures from a schema that are looked at for the one that is told."""
Lines = Mapping[tuple[Any, ...], int]
"""Path (keys as text, list positions as numbers) -> line number, from 1."""

_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# JSON Schema calls 4.0 an integer; Python code that counts with it doesn't
_extend: Any = jsonschema.validators.extend
_Validator = _extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int),
)
_NAMES = {
    "object": "a mapping", "array": "a list", "string": "text", "integer": "a whole number", "number": "a number",
    "boolean": "true or false", "null": "nothing",
}  # fmt: skip


def load_yaml(source: Path | str, what: str, error: type[ReshardError] = FamilyError) -> tuple[Any, Lines]:
    """Data of the YAML file at `source` (a Path) or of YAML text (a str), and the line of each part.

    Keys are text as written. Plain true, false, null and numbers (1e-6 too) are values; everything else is text.
    Raises `error` for anything ambiguous: duplicate keys, aliases, anchors, tags, several documents, deep nesting.
    """
    text = _read(source, what, error) if isinstance(source, Path) else source
    if len(text) > SIZE_LIMIT:
        raise error(f"{what} has {len(text)} characters; at most {SIZE_LIMIT} are read")
    reader = _Reader(what, error)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            reader.take(event)
    except yaml.MarkedYAMLError as fault:
        line = fault.problem_mark.line + 1 if fault.problem_mark else "unknown"
        raise error(f"{what}, line {line}: {fault.problem or fault.context}") from fault
    except (yaml.YAMLError, UnicodeError) as fault:
        raise error(f"{what} isn't YAML: {brief(str(fault).splitlines()[0])}") from fault
    if reader.documents != 1:
        raise error(f"{what} holds {reader.documents} documents; one is wanted")
    return reader.root, reader.lines


def _read(path: Path, what: str, error: type[ReshardError]) -> str:
    try:
        if not path.is_file():
            raise error(f"{what}: {path} is missing or not a file")
        if path.stat().st_size > SIZE_LIMIT:
            raise error(f"{what}: {path} has {path.stat().st_size} bytes; at most {SIZE_LIMIT} are read")
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as fault:
        raise error(f"{what}: {path} isn't UTF-8 at byte {fault.start}") from fault
    except (OSError, ValueError) as fault:
        raise error(f"{what}: {path} can't be read: {getattr(fault, 'strerror', None) or fault}") from fault


class _Reader:
    """Builds data from parser events with a stack of its own, so that nesting can't exhaust Python's."""

    def __init__(self, what: str, error: type[ReshardError]) -> None:
        self.what, self.error = what, error
        self.root: Any = None
        self.documents = 0
        self.lines: dict[tuple[Any, ...], int] = {}
        self.open: list[tuple[Any, tuple[Any, ...]]] = []
        self.key: list[str | None] = []

    def fail(self, line: int, text: str) -> ReshardError:
        return self.error(f"{self.what}, line {line}: {text}")

    def take(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self.open.pop()
            self.key.pop()
        elif isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise self.fail(line, f"the anchor or alias {brief(event.anchor)} isn't allowed; write the value out")
        elif isinstance(event, yaml.NodeEvent):
            self.node(event, line)

    def node(self, event: Any, line: int) -> None:
        if event.tag is not None:
            raise self.fail(line, f"the tag {brief(event.tag)} isn't allowed; write plain values")
        if self.open and isinstance(self.open[-1][0], dict) and self.key[-1] is None:
            self.take_key(event, line)
            return
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = self.scalar(event.value, line) if event.implicit[0] else event.value
        else:
            value = {} if isinstance(event, yaml.MappingStartEvent) else []
        path = self.put(value, line)
        if isinstance(value, (dict, list)):
            if len(self.open) >= DEPTH_LIMIT:
                raise self.fail(line, f"nested more than {DEPTH_LIMIT} deep")
            self.open.append((value, path))
            self.key.append(None)

    def take_key(self, event: Any, line: int) -> None:
        holder, path = self.open[-1]
        if not isinstance(event, yaml.ScalarEvent):
            raise self.fail(line, "a key must be a word, not a list or mapping")
        key = event.value
        if key in holder:
            first = self.lines[(*path, key)]
            raise self.fail(line, f"the key {brief(key)} occurs twice, first in line {first}; keep one")
        holder[key], self.key[-1] = None, key
        self.lines[(*path, key)] = line

    def put(self, value: Any, line: int) -> tuple[Any, ...]:
        if not self.open:
            if self.documents == 1:
                self.root = value
            self.lines[()] = line
            return ()
        holder, path = self.open[-1]
        if isinstance(holder, dict):
            key = self.key[-1]
            holder[key], self.key[-1] = value, None
            return (*path, key)
        holder.append(value)
        self.lines[(*path, len(holder) - 1)] = line
        return (*path, len(holder) - 1)

    def scalar(self, text: str, line: int) -> Any:
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            if len(text) > 19:
                raise self.fail(line, f"the number {brief(text)} is too large")
            return int(text)
        if _FLOAT.fullmatch(text):
            number = float(text)
            if number in (float("inf"), float("-inf")):
                raise self.fail(line, f"the number {brief(text)} is too large")
            return number
        return text


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that load_yaml would take for a value, and never writes aliases."""

    yaml_implicit_resolvers = {
        first: [("tag:reshard:value", re.compile(rf"(?:true|false|null|~|{_INTEGER.pattern}|{_FLOAT.pattern})\Z"))]
        for first in "tfn~-+.0123456789"
    } | {"": [("tag:reshard:value", re.compile(r"\Z"))]}

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _plain(tag: str, text: Any) -> Any:
    """A representer for values that are written bare: the resolver's own tag, so that no tag is printed."""
    return lambda dumper, value: dumper.represent_scalar("tag:reshard:value", text(value))


_Dumper.add_representer(bool, _plain("bool", lambda value: "true" if value else "false"))
_Dumper.add_representer(int, _plain("int", str))
_Dumper.add_representer(float, _plain("float", repr))
_Dumper.add_representer(type(None), _plain("null", lambda value: "null"))


def dump_yaml(data: Any, flow: bool = False) -> str:
    """`data` as YAML text that load_yaml reads back the same; keys keep their order. `flow`: on one line."""
    text: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=2**31 if flow else 118,
        default_flow_style=True if flow else None,
    )  # fmt: skip
    return text.removesuffix("...\n").rstrip("\n") if flow else text


def check_schema(data: Any, schema: Mapping[str, Any], lines: Lines, what: str, error: type[ReshardError]) -> None:
    """Raise `error` for the first place where `data` departs from the JSON schema: key, line, and what is allowed."""
    faults = islice(_Validator(schema).iter_errors(data), MOST_FAULTS)
    # an unknown key first: it may be the misspelling of one that is lacking
    found = sorted(faults, key=lambda fault: (fault.validator != "additionalProperties", _line(fault, lines)))
    if found:
        fault = jsonschema.exceptions.best_match(found[:1])
        raise error(f"{what}, line {_line(fault, lines)}: {_sentence(fault)}")


def _line(fault: Any, lines: Lines) -> int:
    """Where the fault stands: at the unknown key itself, else at the value, or at what holds it."""
    trail = tuple(fault.absolute_path)
    if fault.validator == "additionalProperties" and isinstance(fault.instance, dict):
        unknown = (name for name in fault.instance if name not in fault.schema.get("properties", {}))
        trail += tuple(unknown)[:1]
    while trail and trail not in lines:
        trail = trail[:-1]
    return lines.get(trail, 1)


def _sentence(fault: Any) -> str:
    """What is wrong and what is allowed, in words."""
    key = " / ".join(str(part) for part in fault.absolute_path) or "the document"
    value, rule, kind = fault.instance, fault.validator_value, fault.validator
    if kind == "additionalProperties" and isinstance(value, dict):
        known = fault.schema.get("properties", {})
        unknown = [name for name in value if name not in known]
        return f"{key} has the unknown key {brief(unknown[0] if unknown else '')}; allowed: {', '.join(known)}"
    if kind == "required":
        lacking = [name for name in rule if name not in value]
        return f"{key} lacks the key {brief(lacking[0])}"
    if kind == "dependentRequired":
        return f"{key}: {fault.message}"
    if "description" in fault.schema:
        return f"{key} is {brief(value)}; it must be {fault.schema['description']}"
    if kind == "type":
        names = [rule] if isinstance(rule, str) else rule
        return f"{key} is {brief(value)}; it must be {' or '.join(_NAMES[name] for name in names)}"
    if kind in ("enum", "const"):
        allowed = [rule] if kind == "const" else rule
        return f"{key} is {brief(value)}; allowed: {', '.join(map(str, allowed))}"
    words = {"minimum": "at least", "maximum": "at most", "minItems": "as long as", "maxItems": "no longer than"}
    if kind in words:
        return f"{key} is {brief(value)}; it must be {words[kind]} {rule}"
    return f"{key} is {brief(value)}; it breaks the rule {kind} {brief(rule)}"
