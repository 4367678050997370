"""The one thing ``plan`` may read from the model hub: a model's ``config.json``, into the hub's own cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.errors import SourceError


def read_hub_config(model_id: str, revision: str) -> dict[str, Any] | None:
    """Return the model's ``config.json``, from the cache when it is there, or None when the hub cannot be reached.

    Raises:
        SourceError: The hub refuses: no such model or revision, or terms that were not accepted.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        cached = try_to_load_from_cache(model_id, "config.json", revision=revision)
        path = cached if isinstance(cached, str) else _download(hf_hub_download, model_id, revision)
    except HFValidationError as error:
        raise SourceError(
            f"model.id={model_id!r} is not a hub id: {error}", hint="expected org/name; for files here use model.path="
        ) from error
    except GatedRepoError as error:
        raise SourceError(
            f"the hub refuses {model_id}: its terms were not accepted with this token, or there is none",
            hint=f"accept them at https://huggingface.co/{model_id} and set HF_TOKEN",
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{model_id} has no revision {revision!r}", hint="set model.revision") from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"the hub knows no model {model_id!r}, or it is private",
            hint="check model.id; for a private model set HF_TOKEN",
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        return None
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else None


def _download(download: Any, model_id: str, revision: str) -> str:
    return str(download(model_id, "config.json", revision=revision, etag_timeout=3))
