"""Which token ids to run: given, from a file, from a prompt, or a fixed list."""

from __future__ import annotations

import random
from pathlib import Path

from runtime.text import Tokenizer
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Model

DEFAULT_TOKENS = 16
SEED = 20240817
"""Of the fixed list; the same ids for every run over one vocabulary."""


def default_ids(vocab: int) -> list[int]:
    """A fixed list of DEFAULT_TOKENS ids."""
    chance = random.Random(SEED)
    return [chance.randrange(vocab) for _ in range(DEFAULT_TOKENS)]


def choose_ids(prompt: str | None, given: str | None, tokenizer: Tokenizer | None, model: Model) -> list[int]:
    """The ids of the prompt, of the list `1,2,3`, or of the file FILE.safetensors; RuntimeFault says what is wrong."""
    if prompt is not None and given is not None:
        raise RuntimeFault("--prompt contradicts --input-ids; give one of them")
    if prompt is not None and tokenizer is not None:
        return tokenizer.encode(prompt)
    if given is None:
        return default_ids(model.sizes["vocab"])
    if given.endswith(".safetensors"):
        return read_ids(Path(given))
    words = [word.strip() for word in given.split(",")]
    bad = next((word for word in words if not (word.isascii() and word.isdigit() and len(word) < 10)), None)
    if bad is not None:
        raise RuntimeFault(f"--input-ids: {bad!r} isn't a token id; write 1,2,3 or name a FILE.safetensors")
    return [int(word) for word in words]


def read_ids(path: Path) -> list[int]:
    """`input_ids`, int64 [1, tokens], from a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            if "input_ids" not in file.keys():  # noqa: SIM118 - the file isn't a mapping
                raise RuntimeFault(f"{path} holds no tensor input_ids; it holds {', '.join(file.keys()) or 'nothing'}")
            ids = file.get_tensor("input_ids")
    except (OSError, SafetensorError) as error:
        raise RuntimeFault(f"the ids file {path} can't be read: {error}") from error
    if str(ids.dtype) != "torch.int64" or ids.dim() != 2 or ids.shape[0] != 1:
        raise RuntimeFault(f"{path}: input_ids is {ids.dtype} {list(ids.shape)}, int64 [1, tokens] is wanted")
    return [int(number) for number in ids[0].tolist()]


def check_ids(ids: list[int], new_tokens: int, model: Model) -> None:
    """Refuse no ids, ids outside the vocabulary, and more positions than the model was made for."""
    if not ids:
        raise RuntimeFault("there are no token ids to run; give at least one")
    vocab = model.sizes["vocab"]
    for place, number in enumerate(ids):
        if not 0 <= number < vocab:
            raise RuntimeFault(f"token id {number} at position {place} is outside the vocabulary of 0 to {vocab - 1}")
    limit = model.text.get("max_position_embeddings")
    if isinstance(limit, int) and len(ids) + new_tokens > limit:
        raise RuntimeFault(
            f"{len(ids)} tokens and {new_tokens} new ones are more than the {limit} positions that config.json allows "
            "(max_position_embeddings); give fewer"
        )
