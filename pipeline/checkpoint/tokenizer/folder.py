"""Copy the tokenizer files of a Hugging Face folder: what serving reads, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoint.hfconfig import load_config
from pipeline.checkpoint.readers.base import refuse_placeholder
from pipeline.checkpoint.tokenizer.report import TokenizerReport, as_ids, beyond_vocabulary, write_generation_config
from pipeline.errors import SourceError

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_EXTRA_TEMPLATES = "additional_chat_templates"


def write_from_folder(source: Path, out: Path) -> TokenizerReport:
    """Copy the tokenizer of a folder that has ``tokenizer.json``.

    Raises:
        SourceError: A file is a placeholder or damaged; names it.
    """
    tokenizer = load_tokenizer(source / "tokenizer.json")
    files = copy_files(source, out, _FILES)
    config = _optional(source / "tokenizer_config.json")
    return finish_folder(source, out, tokenizer, kind="copied", config=config, files=files)


def copy_files(source: Path, out: Path, names: tuple[str, ...]) -> list[str]:
    """Copy the files that exist, as real files, with all additional chat templates."""
    copied = []
    for name in names:
        if (source / name).is_file():
            refuse_placeholder(source / name)
            shutil.copyfile(source / name, out / name)
            copied.append(name)
    for template in sorted((source / _EXTRA_TEMPLATES).glob("*.jinja")):
        (out / _EXTRA_TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(template, out / _EXTRA_TEMPLATES / template.name)
        copied.append(f"{_EXTRA_TEMPLATES}/{template.name}")
    return copied


def load_tokenizer(path: Path) -> Any:
    """Load a ``tokenizer.json``.

    Raises:
        SourceError: The file is a placeholder or cannot be understood.
    """
    from tokenizers import Tokenizer

    refuse_placeholder(path)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises its plain base class
        raise SourceError(f"{path}: cannot be read as a tokenizer ({error})", hint="fetch the file again") from error


def finish_folder(
    source: Path, out: Path, tokenizer: Any, *, kind: str, config: Mapping[str, Any], files: Iterable[str]
) -> TokenizerReport:
    """Write ``generation_config.json`` and report.

    The end-of-text ids are those of the source's generation config (else its model config), and the tokenizer's own.

    Args:
        source: The model folder.
        out: Folder that is written.
        tokenizer: The loaded tokenizer.
        kind: For the report.
        config: The tokenizer's config.
        files: What was written before.

    Raises:
        SourceError: An id that begins or ends a text is no id, or outside the model's vocabulary.
    """
    generation = _optional(source / "generation_config.json")
    model = _optional(source / "config.json")
    own = {name: _token_id(config, name, tokenizer, source) for name in ("bos", "eos", "pad")}
    vocab_size = model.get("vocab_size")
    for name, document in (("generation_config.json", generation), ("config.json", model)):
        _refuse_foreign_ids(document, vocab_size, source / name)
    stated = as_ids(generation.get("eos_token_id")) or as_ids(model.get("eos_token_id"))
    eos = tuple(dict.fromkeys([*stated, *([] if own["eos"] is None else [own["eos"]])]))
    if eos and isinstance(vocab_size, int) and min(eos) >= vocab_size:
        raise SourceError(
            f"{source}: the tokenizer ends a text with id {eos[0]}, the model knows ids up to {vocab_size - 1}",
            hint="tokenizer and model do not belong together",
        )
    bos = own["bos"] if own["bos"] is not None else next(iter(as_ids(model.get("bos_token_id"))), None)
    write_generation_config(out, generation, bos=bos, pad=own["pad"], eos=eos)
    template = next(
        (name for name in ("chat_template.jinja", "chat_template.json") if (source / name).is_file()),
        "tokenizer_config.json" if config.get("chat_template") else None,
    )
    warnings = []
    if template is None:
        warnings.append("there is no chat template: chat requests need a configured one")
    if not eos:
        warnings.append("no end-of-text id is known: generation ends only at max_tokens or a stop string")
    warnings += beyond_vocabulary(max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1), vocab_size)
    return TokenizerReport(
        kind=kind,
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        eos_token_ids=eos,
        bos_token_id=bos,
        chat_template=template,
        files=tuple(sorted((*files, "generation_config.json"))),
        warnings=tuple(warnings),
    )


def _refuse_foreign_ids(document: Mapping[str, Any], vocab_size: object, path: Path) -> None:
    """Refuse ids that no text could begin or end with. -1 is an old way to say that there is none."""
    for key in ("bos_token_id", "eos_token_id"):
        value = document.get(key)
        for item in value if isinstance(value, list) else [value]:
            if item is None or item == -1:
                continue
            if not as_ids(item) or (isinstance(vocab_size, int) and item >= vocab_size):
                top = f"0 to {vocab_size - 1}, the model's vocabulary" if isinstance(vocab_size, int) else "an id"
                raise SourceError(
                    f"{path}: {key} is {item!r}; expected {top}",
                    hint="the file belongs to another model, or was changed by hand",
                )


def _optional(path: Path) -> Mapping[str, Any]:
    return load_config(path) if path.is_file() else {}


def _token_id(config: Mapping[str, Any], name: str, tokenizer: Any, source: Path) -> int | None:
    token = config.get(f"{name}_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        return None
    found: int | None = tokenizer.token_to_id(text)
    if found is None:
        raise SourceError(
            f"{source / 'tokenizer_config.json'}: {name}_token {text!r} is not in tokenizer.json",
            hint="the two files belong to different models",
        )
    return found
