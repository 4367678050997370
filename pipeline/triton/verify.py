"""Re-read an emitted repository as Triton will, and say everything that would go wrong there."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import Finding, PipelineError
from pipeline.triton.emitted import REQUIRED_MODELS, Findings, Repository, fault
from pipeline.triton.engine_checks import check_engines
from pipeline.triton.layout import MOUNT_POINT, STAMP, VERSION_FOLDER
from pipeline.triton.model_config import CONFIG_FILE, ModelConfig, datatype_name, parameters_of, read_config
from pipeline.triton.special_ids import read_special_ids


def verify_repository(path: Path) -> list[Finding]:
    """Check a model repository without starting a server.

    Args:
        path: Folder for ``tritonserver --model-repository``.

    Returns:
        Everything found, errors and warnings; empty when all is well. ``path`` of a finding is relative to ``path``.
    """
    if not path.is_dir():
        return [Finding("repository-missing", "error", str(path), f"{path} is not a folder")]
    findings: list[Finding] = []
    configs: dict[str, ModelConfig] = {}
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir()):
        try:
            configs[folder.name] = read_config(folder / CONFIG_FILE)
        except PipelineError as error:
            findings.append(fault("config-parse", f"{folder.name}/{CONFIG_FILE}", error.message))
    repository = Repository(path, configs)
    for check in _CHECKS:
        findings += check(repository)
    return findings


def _check_models(repository: Repository) -> Findings:
    for suffix in repository.groups():
        for role in REQUIRED_MODELS:
            name = f"{role}_{suffix}" if suffix else role
            if not (repository.root / name).is_dir():
                yield fault("model-missing", name, f"the model {name} is missing")
    for name, config in repository.configs.items():
        place = f"{name}/{CONFIG_FILE}"
        if config.name != name:
            yield fault("model-name", place, f"name is {config.name!r}, Triton wants the folder's name {name!r}")
        if not repository.version(name).is_dir():
            yield fault("version-folder", name, f"the version folder {VERSION_FOLDER}/ is missing")
        elif config.backend == "python" and not (repository.version(name) / "model.py").is_file():
            yield fault("model-code", f"{name}/{VERSION_FOLDER}", "model.py is missing; the python backend runs it")


def _check_text(repository: Repository) -> Findings:
    for name in repository.configs:
        place = f"{name}/{CONFIG_FILE}"
        if "${" in (repository.root / place).read_text(encoding="utf-8"):
            yield fault("placeholder", place, "an unfilled placeholder ${...} is left")
        for key, value in parameters_of(repository.configs[name]).items():
            if _is_foreign(value):
                yield fault("absolute-path", place, f"parameter {key} is {value!r}, a path of one machine")
    for file, keys in (
        ("tokenizer_config.json", ("name_or_path", "tokenizer_file")),
        ("config.json", ("_name_or_path",)),
    ):
        for path in sorted(repository.root.rglob(file)):
            data = _json(path)
            for key in keys:
                if isinstance(data, dict) and _is_foreign(data.get(key)):
                    place = str(path.relative_to(repository.root))
                    yield fault("absolute-path", place, f"{key} is {data[key]!r}, a path of the building machine")


def _check_links(repository: Repository) -> Findings:
    for path in sorted(repository.root.rglob("*")):
        if path.is_symlink():
            place = str(path.relative_to(repository.root))
            yield fault("symlink", place, "a symbolic link; it breaks when the repository is moved or mounted")


def _check_agreement(repository: Repository) -> Findings:
    stamps = {name: parameters_of(config).get(STAMP, "none") for name, config in repository.configs.items()}
    if len(set(stamps.values())) > 1:
        yield fault("mixed-versions", CONFIG_FILE, f"the models come from different emissions: {_listing(stamps)}")
    for group in repository.groups().values():
        # A draft engine answers the text model alone, one row at a time.
        configs = {name: repository.configs[name] for role, name in group.items() if role != "tensorrt_llm_draft"}
        sizes = {name: config.max_batch_size for name, config in configs.items()}
        if len(set(sizes.values())) > 1:
            yield fault("max-batch-size", CONFIG_FILE, f"max_batch_size differs between models: {_listing(sizes)}")
        if sizes and min(sizes.values()) < 1:
            yield fault("max-batch-size", CONFIG_FILE, "max_batch_size is below 1: clients expect a batch dimension")
        flags = {
            name: repository.configs[name].model_transaction_policy.decoupled
            for role, name in group.items()
            if role not in ("preprocessing", "postprocessing")
        }
        if len(set(flags.values())) > 1:
            yield fault("decoupled", CONFIG_FILE, f"decoupled differs between models: {_listing(flags)}")
        for role in ("preprocessing", "postprocessing"):
            name = group.get(role, "")
            if name and repository.configs[name].model_transaction_policy.decoupled:
                message = f"{name} answers once per request, decoupled must be false"
                yield fault("decoupled", f"{name}/{CONFIG_FILE}", message)


def _positions(checkpoint: Any) -> int | None:
    """Return how many tokens the positions are good for, as the engine deduces it: linear scaling stretches them."""
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("max_position_embeddings"), int):
        return None
    positions: int = checkpoint["max_position_embeddings"]
    scaling = checkpoint.get("rotary_scaling")
    if not isinstance(scaling, dict) or scaling.get("type", scaling.get("rope_type")) != "linear":
        return positions
    return round(positions * float(scaling.get("factor", 1.0)))


def _check_reference_limits(repository: Repository) -> Findings:
    config = repository.configs.get("tensorrt_llm")
    if config is None or not _is_reference(config):
        return
    place = f"tensorrt_llm/{CONFIG_FILE}"
    parameters = parameters_of(config)
    numbers = {}
    for key in ("max_num_sequences", "max_seq_len"):
        value = parameters.get(key, "")
        if not value.isdecimal() or int(value) < 1:
            yield fault("engine-limits", place, f"parameter {key} is {value!r}, expected a number of at least 1")
        else:
            numbers[key] = int(value)
    slots = numbers.get("max_num_sequences", config.max_batch_size)
    if slots < config.max_batch_size:
        message = f"max_batch_size is {config.max_batch_size}, the engine runs {slots} sequences at once"
        yield fault("engine-limits", place, message)
    checkpoint = _json(repository.version("tensorrt_llm") / "config.json")
    positions = _positions(checkpoint)
    if positions is not None and numbers.get("max_seq_len", 0) > positions:
        message = f"max_seq_len is {numbers['max_seq_len']}, the model has {positions} positions"
        yield fault("engine-limits", place, message)
    if any(group.gpus for group in config.instance_group):
        yield fault("placement", place, "instance_group names GPUs; the reference engine runs on the CPU")


def _check_ensembles(repository: Repository) -> Findings:
    for name, config in repository.role("ensemble"):
        yield from _check_ensemble(repository, f"{name}/{CONFIG_FILE}", config)


def _check_ensemble(repository: Repository, place: str, config: ModelConfig) -> Findings:
    known: dict[str, tuple[str, tuple[int, ...]]] = {tensor.name: _kind(tensor) for tensor in config.input}
    for step in config.ensemble_scheduling.step:
        model = repository.configs.get(step.model_name)
        if model is None:
            yield fault("ensemble-step", place, f"step {step.model_name} has no model with a valid config")
            continue
        inputs = {tensor.name: tensor for tensor in model.input}
        outputs = {tensor.name: tensor for tensor in model.output}
        for theirs, ours in sorted(step.input_map.items()):
            yield from _check_link(
                place, f"input {step.model_name}.{theirs}", inputs.get(theirs), ours, known.get(ours)
            )
        for name, tensor in inputs.items():
            if not tensor.optional and name not in step.input_map:
                yield fault("ensemble-tensor", place, f"input {step.model_name}.{name} is required but not connected")
        for theirs, ours in sorted(step.output_map.items()):
            if theirs not in outputs:
                yield fault("ensemble-tensor", place, f"{step.model_name} has no output {theirs}")
            else:
                known[ours] = _kind(outputs[theirs])
    for tensor in config.output:
        yield from _check_link(place, f"output {tensor.name}", tensor, tensor.name, known.get(tensor.name))


def _check_link(place: str, what: str, tensor: Any, source: str, kind: tuple[str, tuple[int, ...]] | None) -> Findings:
    if tensor is None:
        yield fault("ensemble-tensor", place, f"{what} does not exist")
    elif kind is None:
        yield fault("ensemble-tensor", place, f"{what} is fed from {source}, which nothing makes")
    elif kind[0] != _kind(tensor)[0]:
        yield fault("ensemble-tensor", place, f"{what} is {_kind(tensor)[0]}, its source {source} is {kind[0]}")
    elif not _fits(kind[1], _kind(tensor)[1]):
        dims = f"{list(_kind(tensor)[1])}, its source {source} has {list(kind[1])}"
        yield fault("ensemble-tensor", place, f"{what} has dims {dims}")


def _check_tokenizers(repository: Repository) -> Findings:
    for group in repository.groups().values():
        copies: dict[str, bytes] = {}
        for role in ("preprocessing", "postprocessing"):
            if role in group:
                yield from _check_tokenizer(repository, group[role], copies)
        if len(set(copies.values())) > 1:
            yield fault("tokenizer", min(copies, key=len), f"{' and '.join(sorted(copies))} have different tokenizers")


def _check_tokenizer(repository: Repository, name: str, copies: dict[str, bytes]) -> Findings:
    folder = repository.version(name) / "tokenizer"
    place = f"{name}/{VERSION_FOLDER}/tokenizer"
    if _json(folder / "tokenizer.json") is None:
        yield fault("tokenizer", place, "tokenizer.json is missing or is not JSON")
        return
    copies[name] = (folder / "tokenizer.json").read_bytes()
    try:
        ids = read_special_ids(folder)
    except PipelineError as error:
        yield fault("tokenizer", place, error.message)
        return
    wanted = {"end_ids": ",".join(map(str, ids.end_ids)), "pad_id": str(ids.pad_id)}
    parameters = parameters_of(repository.configs[name])
    for key, value in wanted.items():
        if key in parameters and parameters[key] != value:
            message = f"parameter {key} is {parameters[key]!r}, the tokenizer's is {value!r}"
            yield fault("special-ids", f"{name}/{CONFIG_FILE}", message)
    if not ids.end_ids:
        message = "the tokenizer names no end id; answers run to their length limit"
        yield Finding("special-ids", "warning", place, message, "add eos_token_id to generation_config.json")


def _check_weights(repository: Repository) -> Findings:
    config = repository.configs.get("tensorrt_llm")
    if config is None or not _is_reference(config):
        return
    folder = repository.version("tensorrt_llm")
    place = f"tensorrt_llm/{VERSION_FOLDER}"
    checkpoint = _json(folder / "config.json")
    if not isinstance(checkpoint, dict):
        yield fault("weights", place, "config.json of the checkpoint is missing or is not JSON")
        return
    ranks = int((checkpoint.get("mapping") or {}).get("world_size") or 1)
    for rank in range(ranks):
        problem = _safetensors_problem(folder / f"rank{rank}.safetensors")
        if problem:
            yield fault("weights", f"{place}/rank{rank}.safetensors", problem)
    if not (folder / "reference" / "__init__.py").is_file():
        yield fault("engine-code", place, "the folder reference/ with the engine is missing")


def _safetensors_problem(path: Path) -> str:
    """Say what is wrong with a safetensors file, judging by its header and its size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size:
                return "is not a safetensors file"
            header = json.loads(stream.read(length))
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError, struct.error, RecursionError, AttributeError, LookupError, TypeError):
        return "is not a safetensors file"
    wanted = 8 + length + max(ends, default=0)
    return "" if wanted == size else f"has {size} bytes, its header says {wanted}"


_CHECKS: tuple[Callable[[Repository], Findings], ...] = (
    _check_models,
    _check_text,
    _check_links,
    _check_agreement,
    _check_reference_limits,
    _check_ensembles,
    _check_tokenizers,
    _check_weights,
    check_engines,
)


def _is_reference(config: ModelConfig) -> bool:
    return bool(config.backend == "python" and parameters_of(config).get(STAMP, "").startswith("reference/"))


def _kind(tensor: Any) -> tuple[str, tuple[int, ...]]:
    return datatype_name(tensor.data_type), tuple(tensor.dims)


def _fits(source: tuple[int, ...], target: tuple[int, ...]) -> bool:
    return len(source) == len(target) and all(a == b or -1 in (a, b) for a, b in zip(source, target, strict=True))


def _is_foreign(value: object) -> bool:
    if not isinstance(value, str) or not value.startswith(("/", "~")):
        return False
    if value.startswith("/opt/tritonserver/"):  # part of every serve image
        return False
    return value != MOUNT_POINT and not value.startswith(MOUNT_POINT + "/")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _listing(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(values.items()))
