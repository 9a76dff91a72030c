"""Which modules config.json quantises: what its quantization_config aims at, less what it leaves out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from shard_plans.checkpoints.headers import brief
from shard_plans.errors import ConfigError

LEFT_OUT = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "exclude")
"""Keys under which the formats list modules that stay plain."""
MOST_ENTRIES = 1 << 20
MOST_PATTERNS = 32
MOST_REPEATS = 3
"""`*` and `+` of one pattern: matching takes at most about (length of a name) to the power of this."""
_PART = re.compile(r"\\[\s\S]|\[\^?\]?(?:\\[\s\S]|[^\]\\])*\]|\(\?[:!=]|\(\?|[\s\S]")


class Targets:
    """Answers for a module's stored name (without `.weight`) whether the config quantises it.

    The rule: a module is quantised if the format's `targets` aim at it (all modules, where there are none or they name
    the class Linear), and no entry of a list of modules that stay plain names it. An entry `re:PATTERN` must match from
    the beginning of the name (compressed-tensors); any other entry names a module, or several that lie in it, by whole
    words between the dots, wherever they stand (`lm_head`, `mlp.gate`, `model.layers.3`; `*` stands for any part of a
    word). Sources: compressed-tensors' match_name, transformers' should_convert_module, vLLM's is_layer_skipped.
    """

    def __init__(self, section: Any) -> None:
        """`section` is config.quantization_config; ConfigError where its lists can't be read."""
        section = section if isinstance(section, Mapping) else {}
        self._plain = _Entries((key, section.get(key)) for key in LEFT_OUT)
        groups = section.get("config_groups")
        self._aimed: _Entries | None = None
        if isinstance(groups, Mapping):
            if len(groups) != 1:
                raise ConfigError(
                    f"config.json: quantization_config has {len(groups)} config_groups; only one format at a time can "
                    f"be planned from the config"
                )
            group = next(iter(groups.values()))
            aims = group.get("targets") if isinstance(group, Mapping) else None
            words = _words("targets", aims)
            classes = [word for word in words if word[:1].isupper() and "." not in word]
            unknown = next((word for word in classes if not word.endswith("Linear")), None)
            if unknown is not None:
                raise ConfigError(
                    f"config.json: config_groups / targets names the class {brief(unknown)}; Linear, module names and "
                    f"`re:` patterns are known"
                )
            if words and not classes:
                self._aimed = _Entries([("targets", words)])

    def quantises(self, module: str) -> bool:
        """Whether the module is stored quantised."""
        return (self._aimed is None or self._aimed.name(module)) and not self._plain.name(module)

    def singles_out(self, module: str) -> bool:
        """Whether an entry names a module by a number behind `module` (a single expert of those that lie in it)."""
        return any(entries.reaches(module) for entries in (self._plain, self._aimed) if entries is not None)


class _Entries:
    """A list of module names and patterns, made ready for many questions."""

    def __init__(self, lists: Iterable[tuple[str, Any]]) -> None:
        self._words: set[tuple[str, ...]] = set()
        self._patterns: list[re.Pattern[str]] = []
        for key, value in lists:
            for entry in _words(key, value):
                if entry.startswith("re:"):
                    self._patterns.append(_pattern(entry[3:], key))
                elif "*" in entry:
                    inner = re.escape(entry.removesuffix(".weight")).replace(r"\*", "[^.]*")
                    self._patterns.append(re.compile(rf"(?:[^.]+\.)*?{inner}(?:\.|$)"))
                else:
                    self._words.add(tuple(entry.removesuffix(".weight").split(".")))
                if len(self._patterns) > MOST_PATTERNS:
                    raise ConfigError(f"config.json: {key} has more than {MOST_PATTERNS} patterns")
        self._longest = max(map(len, self._words), default=0)

    def name(self, module: str) -> bool:
        """Whether an entry names the module or one that it lies in."""
        words = module.split(".")
        for start in range(len(words)):
            for stop in range(start + 1, min(len(words), start + self._longest) + 1):
                if tuple(words[start:stop]) in self._words:
                    return True
        return any(pattern.match(module) for pattern in self._patterns)

    def reaches(self, module: str) -> bool:
        """Whether an entry goes on behind `module` with a number."""
        tail = tuple(module.split("."))[-2:]
        return any(
            words[at : at + 2] == tail and words[at + 2].isdigit()
            for words in self._words
            for at in range(len(words) - 2)
        )


def _words(key: str, value: Any) -> list[str]:
    if value is None:
        return []
    listed = isinstance(value, list) and len(value) <= MOST_ENTRIES and all(isinstance(word, str) for word in value)
    if not listed:
        raise ConfigError(
            f"config.json: quantization_config / {key} is {brief(value)}, a list of module names is wanted"
        )
    return list(value)


def _pattern(text: str, key: str) -> re.Pattern[str]:
    """A pattern from a stranger's file: compiled if it can't take long on a name."""
    repeats, before, reason = 0, "", ""
    for part in _PART.findall(text):
        if part in ("*", "+", "{"):
            repeats += 1
            if before == ")":
                reason = "it repeats a group"
        elif (part[:1] == "\\" and part[1:].isdigit()) or part == "(?":
            reason = "it refers back, or sets a flag"
        before = part
    if repeats > MOST_REPEATS or len(text) > 300:
        reason = f"it has {repeats} repetitions and {len(text)} characters, at most {MOST_REPEATS} and 300 are allowed"
    try:
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        reason = str(error)
    if reason:
        raise ConfigError(f"config.json: {key} has the pattern {brief(text)}, which can't be used: {reason}")
    return compiled
