"""The one thing ``plan`` may read from the model hub: a model's ``config.json``, into the hub's own cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.errors import SourceError

_TIMEOUT_S = 3


def read_hub_config(model_id: str, revision: str) -> dict[str, Any] | None:
    """Return the model's ``config.json``, from the cache when it is there, or None when the hub cannot be reached.

    Raises:
        SourceError: The hub refuses: no such model or revision, or terms that were not accepted.
    """
    from huggingface_hub import constants, errors, get_token, try_to_load_from_cache
    from huggingface_hub.errors import (
        FileMetadataError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        cached = try_to_load_from_cache(model_id, "config.json", revision=revision)
        path = cached if isinstance(cached, str) else _download(model_id, revision)
    except HFValidationError as error:
        raise SourceError(
            f"model.id={model_id!r} is not a hub id: {error}", hint="expected org/name; for files here use model.path="
        ) from error
    except GatedRepoError as error:
        raise SourceError(
            f"the hub refuses {model_id}: its terms were not accepted with this token, or there is none",
            hint=f"accept them at {constants.ENDPOINT}/{model_id} and set HF_TOKEN",
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{model_id} has no revision {revision!r}", hint="set model.revision") from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"the hub knows no model {model_id!r}, or it is private",
            hint="check model.id; for a private model set HF_TOKEN",
        ) from error
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise SourceError(
                f"the hub refuses {model_id} with status {error.response.status_code}: "
                + ("HF_TOKEN is not valid or may not read it" if get_token() else "no token is set"),
                hint=f"make a token that may read {constants.ENDPOINT}/{model_id} and set HF_TOKEN",
            ) from error
        return None
    except (LocalEntryNotFoundError, FileMetadataError, errors.HTTPError, OSError):  # type: ignore[attr-defined]
        return None
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"config.json of {model_id} is not JSON: {error}",
            hint=f"something else answered for {constants.ENDPOINT}; remove {path} and run again",
        ) from error
    return content if isinstance(content, dict) else None


def _download(model_id: str, revision: str) -> str:
    """Ask once and shortly, then download: the library's download alone asks six times, for half a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    url = hf_hub_url(model_id, "config.json", revision=revision)
    get_hf_file_metadata(url, timeout=_TIMEOUT_S)
    return hf_hub_download(model_id, "config.json", revision=revision, etag_timeout=_TIMEOUT_S)
