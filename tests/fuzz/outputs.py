"""Targets that lie in an output folder: manifests, and what an unfinished conversion leaves."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import xxhash

from converter.check import check
from converter.output.parts import Part
from converter.restore import restore
from shard_plans.errors import CheckFailed, ReshardError
from shard_plans.inspect import inspect
from tests.fuzz import laws, octets, trees
from tests.fuzz.documents import Target
from tests.fuzz.guard import Fault
from tests.tools import crash, tamper
from tests.tools.converted import contents, converted
from tests.tools.little_configs import PLANS

NAMES = ("manifest.json", "plan.yaml", "family.yaml", "config.json", "..", "source/config.json")


class Outputs(Target):
    """Finished outputs of little checkpoints; a case spoils one file, and it is mended afterwards."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.outs: list[tuple[str, Path, dict[str, bytes]]] = []
        for name, plans in PLANS.items():
            out = folder / "outputs" / name
            converted(self.sources[name], out, plans[0 if name != "llama" else 1], workers=1)
            self.outs.append((name, out, contents(out)))
        self.others = [kept["manifest.json"] for _, _, kept in self.outs]

    def read(self, name: str, out: Path, kept: dict[str, bytes], dice: random.Random) -> None:
        """Check, restore and inspect it; what passes for the checkpoint's must be it."""
        try:
            if dice.random() < 0.1:
                inspect(out)
            result = check(out, workers=1)
            for failure in result.failures:
                if not failure.reason.isprintable() or len(failure.reason) > laws.LONGEST:
                    raise Fault(f"fails its check by no sentence: {failure!a}")
            if not result.passed and dice.random() > 0.05:
                raise CheckFailed("a check found something")
            room = self.room()
            try:
                restore(out, room / "back", 1)
            except ReshardError as error:
                laws.sentence(error)
                if (room / "back").exists():
                    raise Fault("isn't restored, but leaves a folder") from error
                same = False
            else:
                same = laws.weights(room / "back") == laws.weights(self.sources[name])
            if not result.passed:
                raise Fault("fails its check, but is restored") if same else CheckFailed("nothing is restored")
            if not same and check(out, self.sources[name], 1).passed:
                raise Fault("passes the deep check, but isn't restored as it was")
        finally:
            for path, data in kept.items():
                if not (out / path).is_file() or (out / path).read_bytes() != data:
                    (out / path).write_bytes(data)


class Roots(Outputs):
    """manifest.json, mostly with a digest made anew."""

    def mutate(self, dice: random.Random) -> tuple[int, bytes]:  # noqa: D102
        number = dice.randrange(len(self.outs))
        raw = self.outs[number][2]["manifest.json"]
        kind = dice.random()
        if kind < 0.15:
            return number, octets.mutated(raw, dice, self.others)
        tree = trees.mutated(trees.parse(raw), dice, [*NAMES, *list(self.outs[number][2])])
        if kind < 0.9 and isinstance(tree, trees.Object):
            sealed(tree)
        return number, trees.text(tree).encode("utf-8", "surrogatepass")

    def run(self, case: tuple[int, bytes], dice: random.Random) -> None:  # noqa: D102
        name, out, kept = self.outs[case[0]]
        (out / "manifest.json").write_bytes(case[1])
        self.read(name, out, kept, dice)


def sealed(tree: trees.Object) -> None:
    """Make the digest of a root manifest anew, if it is JSON at all."""
    try:
        body = {key: value for key, value in trees.plain(tree).items() if key != "digest"}
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return
    tree.pairs = [pair for pair in tree.pairs if pair.key != "digest"]
    tree.pairs.append(trees.Pair("digest", xxhash.xxh3_128_hexdigest(canonical)))


class ShardManifests(Outputs):
    """Manifests of shard files, mostly with the root's digests made anew."""

    def mutate(self, dice: random.Random) -> tuple[int, str, bytes, bool]:  # noqa: D102
        number = dice.randrange(len(self.outs))
        kept = self.outs[number][2]
        file = dice.choice([name for name in kept if name.startswith("stage-") and name.endswith(".json")])
        if dice.random() < 0.15:
            return number, file, octets.mutated(kept[file], dice, list(kept.values())), dice.random() < 0.7
        tree = trees.parse(kept[file])
        words = ["layers.0.attn.o", "0-3", "1", "scale", "values", "{expert}"]
        return number, file, trees.text(trees.mutated(tree, dice, words)).encode("utf-8", "surrogatepass"), True

    def run(self, case: tuple[int, str, bytes, bool], dice: random.Random) -> None:  # noqa: D102
        number, file, raw, seal = case
        name, out, kept = self.outs[number]
        (out / file).write_bytes(raw)
        if seal:
            tamper.seal(out)
        self.read(name, out, kept, dice)


class Unfinished(Target):
    """What a conversion that was stopped left: marker, journal, records of parts, files under partial names."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.patch = pytest.MonkeyPatch()
        crash.many_units(self.patch)
        self.states: list[tuple[str, dict[str, int], Part, dict[str, bytes], dict[str, bytes]]] = []
        for name, plans in PLANS.items():
            sizes = plans[1]
            whole, out = folder / "whole", folder / "out"
            converted(self.sources[name], whole, sizes, workers=1)
            expected = contents(whole)
            half = sum(len(data) for path, data in expected.items() if path.endswith(".safetensors")) // 3
            if crash.killed_halfway(self.sources[name], out, sizes, half, 1):
                self.states.append((name, sizes, Part(), contents(out), expected))
            shutil.rmtree(out)
            converted(self.sources[name], out, sizes, part=Part(1, 2), workers=1)
            self.states.append((name, sizes, Part(2, 2), contents(out), expected))
            shutil.rmtree(out)
            shutil.rmtree(whole)

    def mutate(self, dice: random.Random) -> tuple[int, dict[str, bytes]]:  # noqa: D102
        number = dice.randrange(len(self.states))
        state = dict(self.states[number][3])
        own = [name for name in state if name.startswith("conversion")]
        name = dice.choice(own if dice.random() < 0.85 else list(state))
        raw = state[name]
        if name.endswith(".journal") and dice.random() < 0.8:
            state[name] = self._journal(raw, dice)
        elif name.startswith("conversion") and raw[:1] in b"{[" and raw and dice.random() < 0.8:
            tree = trees.mutated(trees.parse(raw), dice, ["0-1", *list(state)[:5]])
            state[name] = trees.text(tree).encode("utf-8", "surrogatepass")
        else:
            state[name] = octets.mutated(raw, dice, list(state.values()))
        return number, state

    @staticmethod
    def _journal(raw: bytes, dice: random.Random) -> bytes:
        """Lines that are wrong in themselves, with right sums."""
        lines = [line[17:] for line in raw.decode().splitlines()]
        at = dice.randrange(len(lines))
        if at == 0 or dice.random() < 0.3:
            lines[0] = trees.text(trees.mutated(trees.parse(lines[0]), dice, ["conversion"]))
        else:
            odd = ["", " ", "1", "-1 00", "0 ", "0 zz", "0 00", "99999999 " + "00" * 16, "1 2 3", "x y", "1.5 00"]
            digits = lines[at].split()[-1]
            odd += [f"{dice.randint(0, 60)} {digits}", f"{dice.randint(0, 60)} {digits}{digits}", f"0 {digits[:-2]}"]
            lines[at] = dice.choice(odd)
        return "".join(f"{xxhash.xxh3_64_hexdigest(line.encode())} {line}\n" for line in lines).encode()

    def run(self, case: tuple[int, dict[str, bytes]], dice: random.Random) -> None:  # noqa: D102
        name, sizes, part, _, expected = self.states[case[0]]
        out = self.room() / "out"
        for path, data in case[1].items():
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            (out / path).write_bytes(data)
        try:
            check(out, workers=1)
        except ReshardError as error:
            laws.sentence(error)
        else:
            raise Fault("passes for a finished output")
        result = converted(self.sources[name], out, sizes, workers=1, part=part)
        if not result.missing and contents(out) != expected and check(out, workers=1).passed:
            raise Fault("is gone on with, and passes for finished with other bytes")
