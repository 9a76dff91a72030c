"""Targets that are read before anything is written: headers, index, config, plan, family table, words of options."""

from __future__ import annotations

import json
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from converter.forward.selection import parse_ranks
from converter.output.parts import parse_part
from shard_plans.checkpoints.checkpoint import open_checkpoint
from shard_plans.checkpoints.headers import Kinds, read_header
from shard_plans.documents.plan import format_plan, parse_plan, plan_digest, read_plan
from shard_plans.documents.plan_check import check_plan
from shard_plans.documents.yaml_text import load_yaml
from shard_plans.families.binding import bind
from shard_plans.families.dims import Share, extent, parse_dim, take
from shard_plans.families.expressions import evaluate
from shard_plans.families.family import FOLDER, load_family, read_family
from shard_plans.families.rows import parse_row, parse_section
from shard_plans.inspect import inspect
from shard_plans.memory.cluster import parse_cluster
from shard_plans.memory.count import with_ledger
from shard_plans.placement.experts import format_ids, parse_ids
from tests.fuzz import laws, octets, trees
from tests.fuzz.guard import Fault
from tests.tools.converted import bound
from tests.tools.little import INDEX, write_little
from tests.tools.little_configs import CONFIGS, PLANS, little
from tests.tools.plans import make_plan

WHOLE = 0.02
"""Share of the accepted cases that are converted, checked and restored."""


class Target(ABC):
    """One kind of document: a mutation of it is made from dice, then read in a folder of the target's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = {}
        for name, config in CONFIGS.items():
            self.sources[name] = write_little(folder / "checkpoints" / name, config, little(name), 2, 1)
        self.bindings = {name: bound(source) for name, source in self.sources.items()}

    @abstractmethod
    def mutate(self, dice: random.Random) -> Any:
        """A case."""

    @abstractmethod
    def run(self, case: Any, dice: random.Random) -> None:
        """Read it: returns where it is accepted, raises ReshardError where it is refused."""

    def room(self) -> Path:
        """An empty folder for what a case writes."""
        room = self.folder / "room"
        shutil.rmtree(room, ignore_errors=True)
        room.mkdir()
        return room


class Headers(Target):
    """Safetensors files: the header as JSON, and all of it as bytes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        paths = [path for source in self.sources.values() for path in sorted(source.glob("*.safetensors"))]
        self.seeds = [path.read_bytes() for path in paths]
        self.path = folder / "case.safetensors"

    def mutate(self, dice: random.Random) -> bytes:  # noqa: D102
        raw = dice.choice(self.seeds)
        if dice.random() < 0.3:
            return octets.mutated(raw, dice, self.seeds)
        length = int.from_bytes(raw[:8], "little")
        tree = trees.parse(raw[8 : 8 + length])
        names = [pair.key for pair in tree.pairs]
        if dice.random() < 0.5:  # few tensors: a change is then more often where it matters
            tree.pairs = tree.pairs[:3]
            end = trees.plain(tree.pairs[-1].value)["data_offsets"][1]
            raw = raw[: 8 + length + end]
        data = raw[8 + length :]
        text = trees.text(trees.mutated(tree, dice, names)).encode("utf-8", "surrogatepass")
        said = dice.choice((len(text),) * 12 + (0, max(0, len(text) - 1), len(text) + 1, 2**63, 2**64 - 1, 100_000_001))
        data = dice.choice((data,) * 8 + (data[:-1], data + b"\0", data[: len(data) // 2], b""))
        return said.to_bytes(8, "little") + text + data

    def run(self, case: bytes, dice: random.Random) -> None:  # noqa: D102
        self.path.write_bytes(case)
        found = read_header(self.path, Kinds())
        try:
            theirs = dict(safetensors.deserialize(case))  # type: ignore[no-untyped-call]
        except Exception as error:
            raise Fault(f"is read, though safetensors refuses it: {error}") from error
        columns = zip(found.names, found.dtypes, found.shapes, found.starts.tolist(), found.sizes.tolist(), strict=True)
        ours = {name: (dtype, list(shape), case[start : start + size]) for name, dtype, shape, start, size in columns}
        if ours != {name: (t["dtype"], list(t["shape"]), bytes(t["data"])) for name, t in theirs.items()}:
            raise Fault("is read otherwise than safetensors reads it")


class Indexes(Target):
    """model.safetensors.index.json."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = {name: (source / INDEX).read_bytes() for name, source in self.sources.items()}

    def mutate(self, dice: random.Random) -> tuple[str, bytes]:  # noqa: D102
        name = dice.choice(list(self.seeds))
        if dice.random() < 0.3:
            return name, octets.mutated(self.seeds[name], dice, list(self.seeds.values()))
        words = [path.name for path in self.sources[name].iterdir()] + self.bindings[name].checkpoint.names[:5]
        tree = trees.mutated(trees.parse(self.seeds[name]), dice, words)
        return name, trees.text(tree).encode("utf-8", "surrogatepass")

    def run(self, case: tuple[str, bytes], dice: random.Random) -> None:  # noqa: D102
        name, raw = case
        path = self.sources[name] / INDEX
        path.write_bytes(raw)
        try:
            checkpoint = open_checkpoint(self.sources[name])
        finally:
            path.write_bytes(self.seeds[name])
        wanted = json.loads(self.seeds[name])["weight_map"]
        if json.loads(raw)["weight_map"] != wanted or set(checkpoint.names) != set(wanted):
            raise Fault("is accepted, though it names other files than the tensors lie in")


class Configs(Target):
    """config.json: what is made of the same tensors under another one."""

    def mutate(self, dice: random.Random) -> tuple[str, bytes]:  # noqa: D102
        name = dice.choice(list(CONFIGS))
        raw = (self.sources[name] / "config.json").read_bytes()
        if dice.random() < 0.15:
            return name, octets.mutated(raw, dice, [raw])
        words = [*CONFIGS, *CONFIGS[name], "float32", "fp8", "silu", "yarn", "sliding_attention"]
        return name, trees.text(trees.mutated(trees.parse(raw), dice, words)).encode("utf-8", "surrogatepass")

    def run(self, case: tuple[str, bytes], dice: random.Random) -> None:  # noqa: D102
        name, raw = case
        path = self.sources[name] / "config.json"
        kept = path.read_bytes()
        path.write_bytes(raw)
        try:
            if dice.random() < 0.1:
                inspect(path)
            binding = bound(self.sources[name])
            plan = make_plan(binding, dice.choice(PLANS[name]))
            laws.laid_out(binding, plan)
            if dice.random() < 0.1:
                with_ledger(plan, binding)
            if dice.random() < WHOLE:
                laws.comes_back(self.sources[name], self.room(), plan, binding)
        finally:
            path.write_bytes(kept)


class Plans(Target):
    """Plan documents, and expert placements in them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds: list[tuple[str, str]] = []
        for name, binding in self.bindings.items():
            for sizes in PLANS[name]:
                plan = make_plan(binding, sizes)
                self.seeds.append((name, format_plan(plan)))
                if plan.experts.default:
                    text = self.seeds[-1][1].replace("default: contiguous", self._lists(plan.experts.default))
                    self.seeds.append((name, text))
        self.path = folder / "case.yaml"

    @staticmethod
    def _lists(slots: tuple[tuple[int, ...], ...]) -> str:
        own = "[" + ", ".join(json.dumps(format_ids(ids)) for ids in slots) + "]"
        return f"default: {own}\n  layers: {{1: {own}}}"

    def mutate(self, dice: random.Random) -> tuple[str, bytes]:  # noqa: D102
        name, text = dice.choice(self.seeds)
        kind = dice.random()
        if kind < 0.15:
            return name, octets.mutated(text.encode(), dice, [seed.encode() for _, seed in self.seeds])
        if kind < 0.4:
            return name, octets.lines_mutated(text, dice).encode("utf-8", "surrogatepass")
        tree = trees.tree(load_yaml(text, "it")[0])
        return name, trees.text(trees.mutated(tree, dice, ["0-1", "2", "1-0", "keep", "drop"])).encode()

    def run(self, case: tuple[str, bytes], dice: random.Random) -> None:  # noqa: D102
        name, raw = case
        self.path.write_bytes(raw)
        plan = read_plan(self.path)
        if plan_digest(parse_plan(format_plan(plan))) != plan_digest(plan):
            raise Fault("isn't read back as it is written")
        binding = self.bindings[name]
        check_plan(plan, binding)
        laws.laid_out(binding, plan)
        if dice.random() < 2 * WHOLE:
            laws.comes_back(self.sources[name], self.room(), with_ledger(plan, binding), binding)


class Families(Target):
    """Family tables: their keys, rows, dimensions, expressions."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds: list[tuple[str, str]] = []
        for name, binding in self.bindings.items():
            own = (FOLDER / f"{load_family(CONFIGS[name]).name}.yaml").read_text()
            self.seeds += [(name, binding.family.document), (name, own)]
        self.path = folder / "case.yaml"

    def mutate(self, dice: random.Random) -> tuple[str, bytes]:  # noqa: D102
        name, text = dice.choice(self.seeds)
        kind = dice.random()
        if kind < 0.15:
            return name, octets.mutated(text.encode(), dice, [seed.encode() for _, seed in self.seeds])
        if kind < 0.3:
            return name, octets.lines_mutated(text, dice).encode("utf-8", "surrogatepass")
        tree = trees.tree(load_yaml(text, "it")[0])
        words = [
            "hidden_size", "heads", "tp(heads)*head_dim", "hidden", "norm [hidden]", "embed [tp(vocab), hidden]",
            "else",
            "repeat", "whole", "pad 64", "pad 999999", "first", "last", "layer", "layer ffn=moe",
            "hidden_size * hidden_size",
            "attn.q [hidden*tp(heads), hidden] quant", "x [9*9*9*9, (tp(heads)+1)*(2+3)]", "layer % 2 == 0", "llama",
        ]  # fmt: skip
        return name, trees.text(trees.mutated(tree, dice, words)).encode("utf-8", "surrogatepass")

    def run(self, case: tuple[str, bytes], dice: random.Random) -> None:  # noqa: D102
        name, raw = case
        self.path.write_bytes(raw)
        family = read_family(self.path)
        binding = bind(self.bindings[name].checkpoint, family)
        plan = make_plan(binding, dice.choice(PLANS[name]))
        laws.laid_out(binding, plan)
        if dice.random() < 2 * WHOLE:
            laws.comes_back(self.sources[name], self.room(), with_ledger(plan, binding), binding)


class Words(Target):
    """Small grammars: expert ids, parts, ranks, clusters, dimensions, rows, sections, expressions."""

    SEEDS = (
        "0-3,7", "0-65535", "1/8", "8-15,20", "2x8:H200", "1x8:192GB", "4x8:80 GiB", "tp(heads)*(nope+rope)",
        "2*etp(ffn)",
        "tp(heads) + zeros", "attn.q [tp(heads)*head_dim, hidden] quant bias(a) if(b) tied(embed) F32",
        "layer ffn=moe if a",
        "layer % 2 == 0 and a[1] in [1, 2] or not deep.b", "len(a) // 2 * 3 - -1", "(1+2)*(3+(4+5))", "a.b.c[0][1]",
    )  # fmt: skip

    def mutate(self, dice: random.Random) -> str:  # noqa: D102
        raw = dice.choice(self.SEEDS).encode()
        return octets.mutated(raw, dice, [seed.encode() for seed in self.SEEDS]).decode("utf-8", "surrogateescape")

    def run(self, case: str, dice: random.Random) -> None:  # noqa: D102
        readers: tuple[Callable[[str], object], ...] = (
            self._ids, parse_part, parse_ranks, parse_cluster, self._dim, parse_section, self._expression,
            lambda text: parse_row("a.weight", text, parse_section("first"), ""),
        )  # fmt: skip
        dice.choice(readers)(case)

    @staticmethod
    def _ids(text: str) -> None:
        ids = parse_ids(text)
        if len(ids) > 65536 or parse_ids(format_ids(ids)) != ids:
            raise Fault("isn't read back as it is written")

    @staticmethod
    def _dim(text: str) -> None:
        dim = parse_dim(text)
        sizes = {factor.size: 4 for factor in dim.factors() if factor.size}
        whole = extent(dim, sizes)
        taken = np.zeros(min(whole, 1 << 20), np.int64)
        for index in range(2 if whole < len(taken) else 0):
            shares = {axis: Share(index, 2) for axis in ("tp", "etp", "ep")}
            for start, stop in take(dim, sizes, {}, shares).runs:
                taken[start:stop] += 1
        if whole < len(taken) and not dim.zeros and len({axis for axis, _ in dim.marks}) < 2 and not taken.all():
            raise Fault("is cut so that something is on no rank")

    @staticmethod
    def _expression(text: str) -> None:
        evaluate(text, {"a": [1, 2, 3], "b": 7, "deep": {"b": False}, "word": "x"}, {"layer": 3})
