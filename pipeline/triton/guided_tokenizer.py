"""The description of a tokenizer that the backend's guided decoding (xgrammar) reads at load."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.errors import SourceError
from pipeline.triton.special_ids import SpecialIds

FILE = "xgrammar_tokenizer_info.json"


def write_tokenizer_info(tokenizer: Path, ids: SpecialIds, path: Path) -> None:
    """Write the tokens in the order of their ids, the tokenizer itself, and the ids that end a text.

    Args:
        tokenizer: Folder with ``tokenizer.json``.
        ids: Its end ids; all of them, while upstream's tool takes the tokenizer's own only.
        path: File to write.

    Raises:
        SourceError: The ids have a gap; tokens after it would be taken for others.
    """
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    vocabulary = sorted(loaded.get_vocab(with_added_tokens=True).items(), key=lambda entry: entry[1])
    gap = next((place for place, (_, token) in enumerate(vocabulary) if token != place), None)
    if gap is not None:
        raise SourceError(
            f"{tokenizer / 'tokenizer.json'} has no token with id {gap} but later ones; guided decoding needs all",
            hint="leave guided.backend empty for this model",
        )
    document = {
        "encoded_vocab": [token for token, _ in vocabulary],
        "tokenizer_str": loaded.to_str(),
        "stop_token_ids": list(ids.end_ids),
    }
    path.write_text(json.dumps(document), encoding="utf-8")
