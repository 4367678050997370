"""Convert a source that has only a SentencePiece ``tokenizer.model``: exactly, or not at all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoint.hfconfig import load_config
from pipeline.checkpoint.tokenizer.folder import copy_files, finish_folder
from pipeline.checkpoint.tokenizer.report import TokenizerReport
from pipeline.checkpoint.tokenizer.sentencepiece_bpe import (
    SPACE,
    SentencePieceEncoder,
    normal_pieces,
    ranked_merges,
)
from pipeline.checkpoint.tokenizer.sentencepiece_model import PieceKind, SentencePieceModel, parse_sentencepiece
from pipeline.checkpoint.writer import write_json
from pipeline.errors import SourceError

_BPE = 2
_MODEL_TYPES = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}
_HINT = "take tokenizer.json from the model's page, or make it with transformers (AutoTokenizer.save_pretrained)"
_COPIED = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json")
_PROBES = 2000


def write_from_sentencepiece(source: Path, out: Path) -> TokenizerReport:
    """Convert ``tokenizer.model`` and write the tokenizer files.

    Raises:
        SourceError: The model is of a variant that has no exact counterpart; names what it is.
    """
    path = source / "tokenizer.model"
    model = parse_sentencepiece(path)
    config = load_config(source / "tokenizer_config.json") if (source / "tokenizer_config.json").is_file() else {}
    _refuse_variants(model, config, path)
    pieces = normal_pieces(model)
    tokenizer, doubtful = _build(model, pieces, path)
    _refuse_differences(tokenizer, model, pieces, doubtful, path)
    _add_tokens(tokenizer, model, _added_tokens(source, config), path)
    special = {"bos": model.bos_id, "eos": model.eos_id, "unk": model.unk_id, "pad": model.pad_id}
    names = {f"{name}_token": model.pieces[i].text for name, i in special.items() if 0 <= i < len(model.pieces)}
    _add_bos(tokenizer, model, config)
    tokenizer.save(str(out / "tokenizer.json"))
    merged = {**names, **config, "tokenizer_class": "PreTrainedTokenizerFast"}
    # They would make transformers rebuild the tokenizer from a file that is not there.
    for key in ("sp_model_kwargs", "vocab_file", "use_fast", "legacy"):
        merged.pop(key, None)
    write_json(out / "tokenizer_config.json", merged)
    if not (source / "special_tokens_map.json").is_file():
        write_json(out / "special_tokens_map.json", names)
    files = {*copy_files(source, out, _COPIED), "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    return finish_folder(source, out, tokenizer, kind="sentencepiece", config=merged, files=files)


def _refuse_variants(model: SentencePieceModel, config: Mapping[str, Any], path: Path) -> None:
    kinds = {piece.kind for piece in model.pieces}
    pieces = normal_pieces(model)
    characters = {character for text in pieces for character in text}
    scores = [score for text, (_, score) in pieces.items() if len(text) > 1]
    missing_bytes = model.byte_fallback and sum(p.kind is PieceKind.BYTE for p in model.pieces) != 256
    troubles = (
        (model.model_type != _BPE, f"model type {_MODEL_TYPES.get(model.model_type, model.model_type)}"),
        (model.normalizer not in ("", "identity") or model.has_charsmap, f"normalizer {model.normalizer!r}"),
        (model.remove_extra_whitespaces, "removal of extra whitespace"),
        (not model.escape_whitespaces, "whitespace that is not escaped"),
        (model.whitespace_as_suffix, "whitespace as suffix"),
        (PieceKind.UNUSED in kinds, "unused pieces"),
        (PieceKind.USER_DEFINED in kinds and model.add_dummy_prefix, "user-defined pieces with a leading space"),
        (missing_bytes, "byte fallback without all 256 bytes"),
        (not characters <= pieces.keys(), "pieces of characters that are no pieces themselves"),
        (len(set(scores)) != len(scores), "pieces of equal score"),
        (config.get("legacy") is False and model.add_dummy_prefix, "legacy: false (no space after special tokens)"),
    )
    found = [text for wrong, text in troubles if wrong]
    if found:
        raise SourceError(f"{path}: cannot be converted exactly: {'; '.join(found)}", hint=_HINT)


def _build(model: SentencePieceModel, pieces: Mapping[str, tuple[int, float]], path: Path) -> tuple[Any, list[str]]:
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    merges, doubtful = ranked_merges(pieces)
    vocabulary = {piece.text: i for i, piece in enumerate(model.pieces)}
    if len(vocabulary) != len(model.pieces):
        raise SourceError(
            f"{path}: {len(model.pieces)} pieces, {len(vocabulary)} of them distinct; expected no repeats"
        )
    unknown = model.pieces[model.unk_id].text
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback))
    # Not the Metaspace pre-tokenizer: it adds no space before a text that begins with one, SentencePiece does.
    steps = [normalizers.Prepend(SPACE)] if model.add_dummy_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, doubtful


def _refuse_differences(
    tokenizer: Any, model: SentencePieceModel, pieces: Mapping[str, tuple[int, float]], doubtful: list[str], path: Path
) -> None:
    """Compare with SentencePiece's own algorithm, on every piece, on runs of doubtful ones, and on random sequences."""
    witness = SentencePieceEncoder(model)
    for probe in _probes(pieces, doubtful):
        if tokenizer.encode(probe, add_special_tokens=False).ids != witness.encode(probe):
            raise SourceError(f"{path}: cannot be converted exactly: {probe!r} would get other ids", hint=_HINT)


def _probes(pieces: Mapping[str, tuple[int, float]], doubtful: list[str]) -> Iterator[str]:
    texts = [text.replace(SPACE, " ") for text in pieces]
    yield from texts
    for text in doubtful:
        unit = next(text[:i] for i in range(1, len(text) + 1) if text[:i] * (len(text) // i) == text)
        for count in range(1, 4 * len(text) // len(unit) + 2):
            yield (unit * count).replace(SPACE, " ")
    choose = random.Random(0)
    for _ in range(_PROBES):
        yield "".join(choose.choices(texts, k=choose.randint(2, 12)))
    yield from ("", " ", "  a", "\U0001f600 \u4f60\u597d\n\t", "a\u0301\u0000b")


def _added_tokens(source: Path, config: Mapping[str, Any]) -> dict[int, str]:
    """Return the tokens that were added after training, by id."""
    added = {int(i): str(entry["content"]) for i, entry in config.get("added_tokens_decoder", {}).items()}
    file = source / "added_tokens.json"
    if file.is_file():
        added.update({int(i): text for text, i in load_config(file).items()})
    return added


def _add_tokens(tokenizer: Any, model: SentencePieceModel, added: Mapping[int, str], path: Path) -> None:
    from tokenizers import AddedToken

    control = {i: p.text for i, p in enumerate(model.pieces) if p.kind in (PieceKind.CONTROL, PieceKind.UNKNOWN)}
    users = [p.text for p in model.pieces if p.kind is PieceKind.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in users])
    for i, text in sorted({**control, **added}.items()):
        tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        if tokenizer.token_to_id(text) != i:
            found = tokenizer.token_to_id(text)
            raise SourceError(f"{path}: added token {text!r} would get id {found}; expected {i}", hint=_HINT)


def _add_bos(tokenizer: Any, model: SentencePieceModel, config: Mapping[str, Any]) -> None:
    """Put the begin token before each text, as transformers' tokenizers of these models do unless told otherwise."""
    from tokenizers.processors import TemplateProcessing

    before = model.pieces[model.bos_id].text if model.bos_id >= 0 and config.get("add_bos_token", True) else None
    after = model.pieces[model.eos_id].text if model.eos_id >= 0 and config.get("add_eos_token", False) else None
    if before is None and after is None:
        return
    one = [token for token in (before, "$A", after) if token]
    two = [token for token in (before, "$B:1", after) if token]
    tokens = [(token, tokenizer.token_to_id(token)) for token in (before, after) if token]
    tokenizer.post_processor = TemplateProcessing(single=one, pair=[*one, *two], special_tokens=tokens)
