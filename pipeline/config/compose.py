"""From a command line to a :class:`Spec`: where ``conf/`` is, what Hydra makes of it, and every mistake at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import overrides as command_line
from pipeline.config.fields import leaves, open_section, sections
from pipeline.config.schema import CONFIG_NAME, ENTRY_NAME, SCHEMA_NAME, Config, register
from pipeline.errors import ConfigError, Finding
from pipeline.facts.shipped import shipped
from pipeline.logs import register_secret

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from pipeline.config.spec import Spec

# Options of Hydra's own entry point, which is not used here: leaving them out makes composition a quarter quicker.
_HYDRA_EXTRAS = ("hydra_logging", "job_logging", "help", "hydra_help", "launcher", "sweeper", "output", "env")


@dataclass(frozen=True, slots=True)
class Composed:
    """A typed configuration and how it came about.

    Attributes:
        config: Values, typed and within their bounds.
        choices: Option chosen per group.
        search_path: Folders that were looked in, first found wins.
    """

    config: Config
    choices: Mapping[str, str]
    search_path: tuple[Path, ...]


def conf_root() -> Path:
    """Return the ``conf/`` that the project ships."""
    return shipped("conf")


def search_path(config_dir: Path | None = None) -> tuple[Path, ...]:
    """Return the folders that are searched for options: ``--config-dir``, ``./conf``, the shipped ones.

    A ``./conf`` whose ``config.yaml`` is of another program is left out.

    Raises:
        ConfigError: ``config_dir`` is not a folder.
    """
    found: list[Path] = []
    if config_dir is not None:
        if not config_dir.is_dir():
            hint = "give a folder that holds groups like model/"
            raise ConfigError(f"--config-dir {config_dir} is not a folder", hint=hint)
        found.append(config_dir.resolve())
    local = Path("conf").resolve()
    main = local / f"{CONFIG_NAME}.yaml"
    if local.is_dir() and (not main.is_file() or SCHEMA_NAME in main.read_text(encoding="utf-8")):
        found.append(local)
    found.append(conf_root())
    return tuple(dict.fromkeys(found))


def options(folders: Sequence[Path]) -> dict[str, tuple[str, ...]]:
    """Return the option names of every group found in ``folders``."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for group in (child for child in folder.iterdir() if child.is_dir()):
            names = (file.relative_to(group).with_suffix("").as_posix() for file in group.rglob("*.yaml"))
            found.setdefault(group.name, set()).update(names)
    return {group: tuple(sorted(names)) for group, names in sorted(found.items()) if names}


def compose(arguments: Sequence[str], *, config_dir: Path | None = None) -> Spec:
    """Return the frozen job for a command line.

    A token given as ``source.token`` goes where the hub's client looks for it, and nowhere else.

    Raises:
        ConfigError: With one finding per mistake.
        SourceError: The hub refuses the model.
    """
    from pipeline.config.resolve import resolve

    composed = compose_config(arguments, config_dir=config_dir)
    if composed.config.source.token:
        register_secret(composed.config.source.token)
        os.environ["HF_TOKEN"] = composed.config.source.token
    return resolve(composed)


def compose_config(arguments: Sequence[str], *, config_dir: Path | None = None) -> Composed:
    """Return the typed configuration for a command line.

    Raises:
        ConfigError: With one finding per mistake: unknown groups, options and keys, values of the wrong type or out of
            bounds, damaged files.
    """
    folders = search_path(config_dir)
    known = options(folders)
    typed = command_line.parse(arguments, known)
    if typed.problems:
        raise config_error(typed.problems)
    node, choices = _hydra(folders, typed.choices)
    problems: list[Finding] = []
    for key, value in typed.values.items():
        problem = _assign(node, key, value)
        problems += [problem] if problem else []
    problems += _check(node)
    if problems:
        raise config_error(problems)
    from omegaconf import OmegaConf

    config = OmegaConf.to_object(node)
    if not isinstance(config, Config):
        main = folders[0] / f"{CONFIG_NAME}.yaml"
        raise ConfigError(f"{main} is not made from the schema", hint=f"start its defaults with {SCHEMA_NAME}")
    return Composed(config, choices, folders)


def config_error(problems: Sequence[Finding]) -> ConfigError:
    """Return one error for several mistakes."""
    if len(problems) == 1:
        return ConfigError(problems[0].message, hint=problems[0].hint, findings=problems)
    return ConfigError(f"{len(problems)} mistakes in the configuration", findings=problems)


def _hydra(folders: Sequence[Path], choices: Mapping[str, str]) -> tuple[DictConfig, dict[str, str]]:
    """Compose the chosen options; everything else of Hydra (logging, folders, working directory) stays unused."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    register()
    rest = ",".join(_quoted(f"file://{folder}") for folder in folders[1:])
    lines = [f"~hydra/{name}" for name in _HYDRA_EXTRAS]
    lines += [f"hydra.searchpath=[{rest}]"] if rest else []
    lines += [f"{'' if group in sections() else '+'}{group}={option}" for group, option in choices.items()]
    try:
        with initialize_config_dir(str(folders[0]), version_base="1.3"):
            node = hydra_compose(ENTRY_NAME, overrides=lines, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, YAMLError, OSError) as error:
        raise config_error(_diagnose(folders, error)) from error
    chosen = {str(k): str(v) for k, v in node.hydra.runtime.choices.items() if not str(k).startswith("hydra/")}
    with open_dict(node):
        del node["hydra"]
    OmegaConf.set_struct(node, True)
    return node, chosen


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _assign(node: DictConfig, key: str, value: Any) -> Finding | None:
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    try:
        section = key.rpartition(".")[0]
        if open_section(key):
            entries = OmegaConf.select(node, section)
            with open_dict(entries):
                entries[key.rpartition(".")[2].lstrip("-")] = value
            return None
        if section and OmegaConf.select(node, section) is None:
            OmegaConf.update(node, section, sections()[section])
        OmegaConf.update(node, key, value)
    except OmegaConfBaseException as error:
        return Finding("config-bad-value", "error", key, f"{key}: {_first_line(error)}")
    return None


def _check(node: DictConfig) -> Iterator[Finding]:
    """Yield what is wrong with values wherever they came from, after interpolation."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for path, leaf in leaves().items():
        section = path.rpartition(".")[0]
        try:
            if section and OmegaConf.select(node, section) is None:
                continue
            value = OmegaConf.select(node, path, throw_on_missing=True)
        except OmegaConfBaseException as error:
            yield Finding("config-bad-value", "error", path, f"{path}: {_first_line(error)}")
            continue
        problem = leaf.problem(value)
        if problem:
            yield Finding("config-bad-value", "error", path, f"{path}: {problem}")


def _diagnose(folders: Sequence[Path], error: Exception) -> list[Finding]:
    """Look through the files for what Hydra stumbled over; Hydra itself names only the first fault."""
    import yaml

    found: list[Finding] = []
    for folder in folders[:-1] or folders:
        for file in sorted(folder.rglob("*.yaml")):
            group = file.relative_to(folder).parts[0] if file.parent != folder else ""
            if group and group not in sections():
                continue
            try:
                content = yaml.safe_load(file.read_text(encoding="utf-8"))
            except (yaml.YAMLError, OSError, UnicodeDecodeError) as fault:
                found.append(Finding("config-file", "error", str(file), f"{file} is not YAML: {_one_line(fault)}"))
                continue
            for key in _keys(content, group):
                if "_target_" in key.split("."):
                    message = f"'_target_' in {file} is refused: a configuration never names code"
                    found.append(Finding("config-names-code", "error", key, message))
                elif key not in leaves() and key not in sections() and not open_section(key):
                    found.append(command_line.unknown_key(key, str(file)))
    return found or [Finding("config-file", "error", "", _one_line(error))]


def _keys(content: Any, prefix: str) -> Iterator[str]:
    if not isinstance(content, dict):
        return
    for name, value in content.items():
        if name == "defaults" or (not prefix and name == "hydra"):
            continue
        path = f"{prefix}.{name}" if prefix else str(name)
        yield path
        if isinstance(value, dict):
            yield from _keys(value, path)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
