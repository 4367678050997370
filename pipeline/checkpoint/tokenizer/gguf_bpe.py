"""Rebuild the tokenizer of a GGUF file with byte-level BPE.

``tokenizer.ggml.pre`` names the way text is cut before merging. Only the names whose rule is known exactly are
accepted: a near miss gives other ids for some texts and nobody notices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoint.readers.gguf_header import read_gguf_header
from pipeline.checkpoint.tokenizer.report import TokenizerReport, beyond_vocabulary, write_generation_config
from pipeline.checkpoint.writer import write_json
from pipeline.errors import SourceError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def _byte_level() -> Any:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_bytes() -> Any:
    from tokenizers.pre_tokenizers import Digits, Sequence

    return Sequence([Digits(individual_digits=True), _byte_level()])


# Name in the file -> pre-tokenizer. "smollm" splits digits one by one (the published tokenizer does; transformers' own
# reader of GGUF files forgets it).
_PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {"smollm": _digits_then_bytes, "gpt-2": _byte_level}


def write_from_gguf(path: Path, out: Path) -> TokenizerReport:
    """Write the tokenizer of a GGUF file.

    Raises:
        SourceError: The kind of tokenizer or its pre-tokenizer is not known exactly, or the lists do not fit.
    """
    header = read_gguf_header(path)
    metadata = header.metadata
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise SourceError(
            f"{path}: tokenizer model {model!r} cannot be rebuilt exactly; expected gpt2 (byte-level BPE)",
            hint="take the model with its tokenizer.json from the hub",
        )
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise SourceError(
            f"{path}: tokenizer.ggml.pre {pre!r} is not known; expected one of {', '.join(_PRE_TOKENIZERS)}",
            hint="take the model with its tokenizer.json from the hub",
        )
    tokens, kinds = _token_lists(metadata, path)
    special = _special_ids(metadata, len(tokens), path)
    tokenizer = _build(tokens, kinds, metadata, special, path)
    tokenizer.save(str(out / "tokenizer.json"))
    names = {f"{name}_token": tokens[i] for name, i in special.items() if name in ("bos", "eos", "unk", "pad")}
    write_json(out / "tokenizer_config.json", _tokenizer_config(tokens, kinds, metadata, names))
    write_json(out / "special_tokens_map.json", names)
    eos = tuple(dict.fromkeys(special[name] for name in ("eos", "eot", "eom") if name in special))
    write_generation_config(out, {}, bos=special.get("bos"), pad=special.get("pad"), eos=eos)
    embedding = header.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None and embedding.shape else len(tokens)
    has_template = bool(metadata.get("tokenizer.chat_template"))
    return TokenizerReport(
        kind="gguf",
        vocab_size=len(tokens),
        eos_token_ids=eos,
        bos_token_id=special.get("bos"),
        chat_template="tokenizer_config.json" if has_template else None,
        files=("generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"),
        warnings=(
            *(() if has_template else ("the file holds no chat template: chat requests need a configured one",)),
            *beyond_vocabulary(len(tokens) - 1, rows),
        ),
    )


def _token_lists(metadata: Mapping[str, Any], path: Path) -> tuple[list[str], list[int]]:
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if not isinstance(metadata.get(key), list) or not all(isinstance(text, str) for text in metadata[key]):
            raise SourceError(f"{path}: metadata lacks {key}, or it is no list of texts")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        counts = f"{len(tokens)} tokens, {len(set(tokens))} distinct, {len(kinds)} types"
        raise SourceError(f"{path}: {counts}; expected the same number of each")
    return tokens, kinds


def _build(
    tokens: list[str], kinds: list[int], metadata: Mapping[str, Any], special: Mapping[str, int], path: Path
) -> Any:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE
    from tokenizers.processors import TemplateProcessing

    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    wrong = next((m for m in merges if len(m) != 2), None)
    if wrong is not None:
        raise SourceError(f"{path}: merge {' '.join(wrong)!r} has {len(wrong)} parts; expected 2")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the library raises its plain base class
        raise SourceError(f"{path}: tokens and merges do not belong together ({error})") from error
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]()
    tokenizer.decoder = ByteLevel()
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        chosen = [token for token, its in zip(tokens, kinds, strict=True) if its == kind]
        add([AddedToken(token, special=kind == _CONTROL, normalized=False) for token in chosen])
    if metadata.get("tokenizer.ggml.add_bos_token"):
        if "bos" not in special:
            raise SourceError(f"{path}: metadata lacks tokenizer.ggml.bos_token_id, and add_bos_token asks for it")
        bos = tokens[special["bos"]]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer


def _special_ids(metadata: Mapping[str, Any], count: int, path: Path) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "eot": "eot", "eom": "eom"}
    found = {}
    for stored, name in names.items():
        token = metadata.get(f"tokenizer.ggml.{stored}_token_id")
        if token is None:
            continue
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < count:
            raise SourceError(f"{path}: tokenizer.ggml.{stored}_token_id is {token!r}; expected 0 to {count - 1}")
        found[name] = token
    if "eos" not in found:
        raise SourceError(f"{path}: metadata lacks tokenizer.ggml.eos_token_id; generation would never end")
    return found


def _tokenizer_config(
    tokens: list[str], kinds: list[int], metadata: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, Any]:
    added = {
        str(i): {
            "content": tokens[i],
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": kinds[i] == _CONTROL,
        }
        for i in range(len(tokens))
        if kinds[i] in (_CONTROL, _USER_DEFINED)
    }
    config: dict[str, Any] = {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        **names,
        "clean_up_tokenization_spaces": False,
        # Not the class of the original: that one would rebuild its own pre-tokenizer and lose the digit rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if length is not None:
        config["model_max_length"] = length
    if metadata.get("tokenizer.chat_template"):
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config
