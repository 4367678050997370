"""Emit a Triton model repository that just loads: self-contained, relocatable, every shared value derived once.

Layout (target ``reference``)::

    tensorrt_llm/    config.pbtxt  1/ model.py, the engine's code in reference/, config.json, rank*.safetensors,
                                      tokenizer.json for guided decoding, where llguidance understands it
    preprocessing/   config.pbtxt  1/ model.py, tokenizer/
    postprocessing/  config.pbtxt  1/ model.py, tokenizer/
    ensemble/        config.pbtxt  1/ (empty but for a note: the version folder must exist)
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pipeline
from pipeline.errors import ConfigError, SourceError
from pipeline.facts.shipped import shipped
from pipeline.triton import tensors
from pipeline.triton.model_config import ModelConfig, ensemble_model, python_model, write_config
from pipeline.triton.special_ids import SpecialIds, read_special_ids

_log = logging.getLogger(__name__)

LAYOUT_VERSION = "2"
VERSION_FOLDER = "1"
STAMP = "repository_layout"


@dataclass(frozen=True, slots=True)
class RepositorySettings:
    """What is decided once and has to agree in every model of a repository.

    Attributes:
        max_batch_size: Sequences in flight in the engine; also the rows Triton lets one request have.
        max_seq_len: Prompt plus new tokens of one sequence.
        threads: Threads of the reference engine; None lets the engine decide.
        target: What answers: ``reference``.
        decoupled: Whether a request may get several responses; streaming, several rows and several sequences need it.
        preprocessing_instances: Processes that encode.
        postprocessing_instances: Processes that decode; with more than one, an ensemble's stream may be reordered.
        exclude_input_in_output: Answer with the new tokens only, unless the request says otherwise.
        add_special_tokens: Let preprocessing add what the tokenizer adds to a prompt (BOS, and exactly once).
        skip_special_tokens: Leave special tokens out of the text.
    """

    max_batch_size: int
    max_seq_len: int
    threads: int | None = None
    target: str = "reference"
    decoupled: bool = True
    preprocessing_instances: int = 1
    postprocessing_instances: int = 1
    exclude_input_in_output: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True


def emit_repository(out: Path, *, checkpoint: Path, tokenizer: Path, settings: RepositorySettings) -> None:
    """Write a model repository.

    Args:
        out: Folder to create; must be empty or absent.
        checkpoint: TensorRT-LLM checkpoint: ``config.json`` and ``rank*.safetensors``. Weights are hard-linked where
            the file system allows, else copied.
        tokenizer: ``tokenizer.json`` and its companions; copied.
        settings: Shared values.

    Raises:
        ConfigError: A setting is impossible.
        SourceError: An input is missing or damaged, or ``out`` has files.
    """
    _check_settings(settings)
    if out.exists() and any(out.iterdir()):
        raise SourceError(f"{out} is not empty", hint="emit into a new folder")
    if not (tokenizer / "tokenizer.json").is_file():
        raise SourceError(f"{tokenizer} has no tokenizer.json; the repository cannot turn text into tokens without it")
    _TARGETS[settings.target](out, checkpoint, tokenizer, settings)


def _emit_reference(out: Path, checkpoint: Path, tokenizer: Path, settings: RepositorySettings) -> None:
    vocab_size = _vocab_size(checkpoint)
    templates = shipped("triton_repo") / "reference"
    guided = has_guided_decoding(tokenizer / "tokenizer.json")
    configs = reference_configs(settings, read_special_ids(tokenizer), vocab_size, guided=guided)
    for name, config in configs.items():
        write_config(out / name, config)
        _copy_tree(templates / name / VERSION_FOLDER, out / name / VERSION_FOLDER)
    engine = out / "tensorrt_llm" / VERSION_FOLDER
    _copy_tree(Path(pipeline.__file__).parent / "engines" / "reference", engine / "reference")
    for source in _files(checkpoint):
        if (engine / source.name).exists():
            raise SourceError(f"{source} would overwrite a file of the Triton model of that name")
        _link_or_copy(source, engine / source.name)
    if guided:
        _copy(tokenizer / "tokenizer.json", engine / "tokenizer.json")
    for name in ("preprocessing", "postprocessing"):
        folder = out / name / VERSION_FOLDER / "tokenizer"
        folder.mkdir()
        for source in _files(tokenizer):
            _copy(source, folder / source.name)


def has_guided_decoding(tokenizer: Path) -> bool:
    """Say whether llguidance can read a ``tokenizer.json``; it knows byte-level and byte-fallback vocabularies."""
    from llguidance import LLTokenizer

    try:
        LLTokenizer(tokenizer.read_text(encoding="utf-8"))
    except Exception as error:  # whatever its Rust side raises, the rest of the model works
        _log.info("no guided decoding: llguidance cannot read %s: %s", tokenizer.name, error)
        return False
    return True


def reference_configs(
    settings: RepositorySettings, ids: SpecialIds, vocab_size: int, *, guided: bool = False
) -> dict[str, ModelConfig]:
    """Return the config of each model of a ``reference`` repository, by name.

    Args:
        settings: Shared values.
        ids: End and padding ids of the tokenizer.
        vocab_size: Vocabulary of the engine, without padding.
        guided: Whether the repository has guided decoding.
    """
    end_ids = ",".join(map(str, ids.end_ids))
    batch = settings.max_batch_size
    configs = {
        "tensorrt_llm": python_model(
            "tensorrt_llm",
            inputs=tensors.LLM_INPUTS + tensors.OWN_LLM_INPUTS,
            outputs=tensors.LLM_OUTPUTS + tensors.OWN_LLM_OUTPUTS,
            max_batch_size=batch,
            decoupled=settings.decoupled,
            parameters={
                "target": settings.target,
                "max_num_sequences": str(batch),
                "max_seq_len": str(settings.max_seq_len),
                "threads": "" if settings.threads is None else str(settings.threads),
                "exclude_input_in_output": _flag(settings.exclude_input_in_output),
                "max_beam_width": "1",
                "end_ids": end_ids,
                "guided_decoding_backend": "llguidance" if guided else "",
            },
        ),
        "preprocessing": python_model(
            "preprocessing",
            inputs=tensors.PREPROCESSING_INPUTS,
            outputs=tensors.PREPROCESSING_OUTPUTS,
            max_batch_size=batch,
            instances=settings.preprocessing_instances,
            parameters={
                "add_special_tokens": _flag(settings.add_special_tokens),
                "end_ids": end_ids,
                "pad_id": str(ids.pad_id),
                "vocab_size": str(vocab_size),
            },
        ),
        "postprocessing": python_model(
            "postprocessing",
            inputs=tensors.POSTPROCESSING_INPUTS,
            outputs=tensors.POSTPROCESSING_OUTPUTS,
            max_batch_size=batch,
            instances=settings.postprocessing_instances,
            parameters={"skip_special_tokens": _flag(settings.skip_special_tokens), "end_ids": end_ids},
        ),
        "ensemble": ensemble_model(max_batch_size=batch, decoupled=settings.decoupled),
    }
    for config in configs.values():
        config.parameters[STAMP].string_value = f"{settings.target}/{LAYOUT_VERSION}"
    return configs


_TARGETS: dict[str, Callable[[Path, Path, Path, RepositorySettings], None]] = {"reference": _emit_reference}


def _check_settings(settings: RepositorySettings) -> None:
    if settings.target not in _TARGETS:
        raise ConfigError(f"target is {settings.target!r}, a repository can be emitted for {', '.join(_TARGETS)}")
    lowest = {
        "max_batch_size": (settings.max_batch_size, 1),
        "max_seq_len": (settings.max_seq_len, 2),
        "threads": (1 if settings.threads is None else settings.threads, 1),
        "preprocessing_instances": (settings.preprocessing_instances, 1),
        "postprocessing_instances": (settings.postprocessing_instances, 1),
    }
    wrong = [f"{name} is {value}, expected at least {low}" for name, (value, low) in lowest.items() if value < low]
    if wrong:
        raise ConfigError("; ".join(wrong))


def _vocab_size(checkpoint: Path) -> int:
    path = checkpoint / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"{path} is not the config of a TensorRT-LLM checkpoint: {type(error).__name__}: {error}",
            hint="python -m pipeline checkpoint inspect shows what a folder holds",
        ) from error


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith("."))


def _copy_tree(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            _copy_tree(path, target / path.name)
        elif path.is_file():
            _copy(path, target / path.name)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)  # follows links: the repository holds real files
    target.chmod(0o644)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without hard links
        _copy(source, target)


def _flag(value: bool) -> str:
    return "true" if value else "false"
