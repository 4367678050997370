"""Pack what serving needs of a tokenizer: from a Hugging Face folder, a GGUF file, or a SentencePiece model."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.readers import find_gguf
from pipeline.checkpoint.tokenizer.report import TokenizerReport
from pipeline.errors import SourceError

__all__ = ["TokenizerReport", "write_tokenizer"]


def write_tokenizer(source: Path, out: Path) -> TokenizerReport:
    """Write ``tokenizer.json``, ``tokenizer_config.json``, the chat templates, ``special_tokens_map.json`` and
    ``generation_config.json`` (with all end-of-text ids).

    Args:
        source: Model folder, ``.gguf`` file, or folder with exactly one.
        out: Folder to write into; made if missing.

    Raises:
        SourceError: There is no tokenizer, or one that cannot be rebuilt exactly; names what stands in the way.
    """
    gguf = find_gguf(source)
    out.mkdir(parents=True, exist_ok=True)
    if gguf is not None:
        from pipeline.checkpoint.tokenizer.gguf_bpe import write_from_gguf

        return write_from_gguf(gguf, out)
    from pipeline.checkpoint.tokenizer.folder import write_from_folder

    if (source / "tokenizer.json").is_file():
        return write_from_folder(source, out)
    if (source / "tokenizer.model").is_file():
        from pipeline.checkpoint.tokenizer.sentencepiece import write_from_sentencepiece

        return write_from_sentencepiece(source, out)
    raise SourceError(
        f"{source}: no tokenizer; expected tokenizer.json or tokenizer.model",
        hint="fetch the tokenizer files of the model too",
    )
