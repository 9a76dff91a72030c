"""Text to token ids and back, with the tokenizer that the output carries along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shard_plans.errors import RuntimeFault

TOKENIZER = "tokenizer.json"


class Tokenizer:
    """The checkpoint's own tokenizer; special tokens as it adds them itself, no chat template."""

    def __init__(self, folder: Path) -> None:
        """Read `folder`/tokenizer.json; RuntimeFault where the file or the tokenizers library is missing."""
        path = folder / TOKENIZER
        if not path.is_file():
            raise RuntimeFault(
                f"the checkpoint carries no {TOKENIZER}, so a prompt can't become token ids; give --input-ids instead"
            )
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise RuntimeFault(
                "text needs the tokenizers library, which isn't installed; run: pip install tokenizers"
            ) from error
        try:
            self._inner: Any = Library.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise RuntimeFault(f"{path} can't be read as a tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; RuntimeFault where there are none."""
        try:
            ids = [int(i) for i in self._inner.encode(text).ids]
        except Exception as error:  # the library raises bare Exception
            raise RuntimeFault(f"the checkpoint's tokenizer can't encode the prompt {text!r}: {error}") from error
        if not ids:
            raise RuntimeFault(f"the prompt {text!r} gives no tokens; give at least one word")
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return str(self._inner.decode(ids))


def end_tokens(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """Ids that end a generation: generation_config.json's eos_token_id, else config.json's; none if neither says."""
    path = folder / "generation_config.json"
    found: Any = None
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError, RecursionError, OSError) as error:
            raise RuntimeFault(f"{path} isn't a JSON object: {error}") from error
    if found is None:
        found = config.get("eos_token_id")
    values = found if isinstance(found, list) else [found]
    return frozenset(value for value in values if isinstance(value, int) and not isinstance(value, bool))
