"""Whether a checkpoint's headers say what its config.json does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shard_plans.families.binding import Binding
from shard_plans.families.config_binding import bind_config
from shard_plans.families.parameter import Parameter, Part


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that config.json and the headers describe differently. Shapes agree since the checkpoint was bound."""

    name: str
    config: str
    """How it is stored by config.json."""
    header: str
    """How it is stored by the header of its file."""
    kind: str
    """absent: not stored, which the table allows; format: quantised or not; type: of plain weights, or of scales."""

    @property
    def text(self) -> str:
        """As part of a sentence."""
        return f"tensor {self.name} is {self.config} by config.json, {self.header} by the file's header"


def differences(binding: Binding) -> Iterator[Difference]:
    """Where the headers of a checkpoint leave what its config.json alone would make of it, in execution order."""
    source = binding.checkpoint
    expected = bind_config(source.config, source.config_digest, source.folder / "config.json", binding.family)
    stored = {(p.role, p.layer, p.number): p for p in binding.parameters}
    for said in expected.parameters:
        found = stored.get((said.role, said.layer, said.number))
        if found is None:
            yield Difference(_name(said.parts[0]), _stored(said, said.parts[0]), "absent", "absent")
        elif found.format != said.format:
            header = _stored(found, found.parts[0])
            yield Difference(_name(found.parts[0]), _stored(said, said.parts[0]), header, "format")
        else:
            for here, there in zip(found.parts, said.parts, strict=True):
                if (here.dtype, here.shape) != (there.dtype, there.shape):
                    yield Difference(_name(here), _typed(there), _typed(here), "type")


def disagreements(binding: Binding) -> tuple[str, ...]:
    """Notes that name the first weight which is quantised by the one and plain by the other, and the first whose plain
    type differs. What is stored counts; engines decide by the config, so such a checkpoint may not load there.
    """
    notes = []
    found = list(differences(binding))
    quantised = [each for each in found if each.kind == "format"]
    plain = [each for each in found if each.kind == "type" and each.name.endswith((".weight", ".bias"))]
    for some, advice in ((quantised, "; quantization_config doesn't say what stays plain"), (plain, "")):
        if some:
            others = f" ({len(some)} weights differ so)" if len(some) > 1 else ""
            notes.append(f"{some[0].text}{others}: the header counts{advice}")
    return tuple(notes)


def _name(part: Part) -> str:
    return part.pattern.replace("{expert}", "0")


def _typed(part: Part) -> str:
    return f"{part.dtype} {list(part.shape)}"


def _stored(parameter: Parameter, part: Part) -> str:
    if parameter.format is None:
        return f"plain {part.dtype}"
    return f"{part.dtype} with scales ({parameter.format.name})"
