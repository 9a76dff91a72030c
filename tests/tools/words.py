"""A tokenizer of a few words, for checkpoints that have none."""

from __future__ import annotations

from pathlib import Path

WORDS = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "the": 10, "capital": 11, "of": 12, "France": 13, "is": 14}


def write_tokenizer(folder: Path, begin: bool = True) -> Path:
    """Write tokenizer.json into `folder`; with `begin`, it puts <s> before every text. Other ids are `word<id>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = WORDS | {f"word{number}": number for number in range(256) if number not in WORDS.values()}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>", "<pad>"])
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
