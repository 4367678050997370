"""A model repository on disk, as the checks see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import Finding
from pipeline.triton.layout import MOUNT_POINT, VERSION_FOLDER
from pipeline.triton.model_config import ModelConfig

REQUIRED_MODELS = ("tensorrt_llm", "preprocessing", "postprocessing", "ensemble")
OPTIONAL_MODELS = ("tensorrt_llm_bls", "tensorrt_llm_draft")

Findings = Iterator[Finding]


@dataclass(frozen=True, slots=True)
class Repository:
    """A model repository on disk.

    Attributes:
        root: The folder.
        configs: The configs that parse, by folder name.
    """

    root: Path
    configs: Mapping[str, ModelConfig]

    def version(self, model: str) -> Path:
        """Return the version folder of a model."""
        return self.root / model / VERSION_FOLDER

    def groups(self) -> dict[str, dict[str, str]]:
        """Return the models that belong together, by what their names end in: model name by role.

        A repository with several engines has ``ensemble_a``, ``tensorrt_llm_a`` …, and so on for each.
        """
        found: dict[str, dict[str, str]] = {}
        for name in self.configs:
            for role in (*OPTIONAL_MODELS, *REQUIRED_MODELS):
                if name == role or name.startswith(f"{role}_"):
                    found.setdefault(name[len(role) + 1 :], {})[role] = name
                    break
        return found or {"": {}}

    def role(self, role: str) -> list[tuple[str, ModelConfig]]:
        """Return name and config of each model of a role."""
        return [(group[role], self.configs[group[role]]) for group in self.groups().values() if role in group]

    def has_mounted(self, path: str) -> bool:
        """Say whether a file that the server looks for below the mount point is here."""
        inside = path.removeprefix(f"{MOUNT_POINT}/")
        return inside != path and (self.root / inside).is_file()


def fault(rule: str, path: str, message: str) -> Finding:
    """Return an error of what was emitted."""
    return Finding(rule, "error", path, message, "emit the repository again")
