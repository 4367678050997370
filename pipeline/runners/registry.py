"""Ask an image registry for a digest without fetching the image: what ``lock`` and pyxis need.

Source: OCI distribution specification (manifest HEAD, ``Docker-Content-Digest``) and Docker's token authentication.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import ToolError
from pipeline.runners.job import repository_of

TIMEOUT_S = 20.0

_DOCKER_HUB = "registry-1.docker.io"
_MANIFESTS = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def fetch_digest(reference: str, *, timeout_s: float = TIMEOUT_S) -> str:
    """Return the digest (``sha256:…``) that a reference means now; of a multi-platform image, that of its index.

    Credentials come from the file that ``docker login`` and ``podman login`` write. A reference with a digest needs no
    registry.

    Raises:
        ToolError: No such image, access refused, or no answer.
    """
    if "@" in reference:
        digest = reference.partition("@")[2]
        if not _DIGEST.fullmatch(digest):
            raise ToolError(f"{reference}: {digest!r} is no digest; expected sha256: and 64 hexadecimal digits")
        return digest
    host, name, tag = _parts(reference)
    url = f"{_scheme(host)}://{host}/v2/{name}/manifests/{tag}"
    headers = {"Accept": _MANIFESTS}
    credentials = _credentials(host)
    try:
        try:
            return _digest_at(url, headers, timeout_s)
        except urllib.error.HTTPError as error:
            challenge = error.headers.get("WWW-Authenticate", "")
            if error.code != 401 or not challenge:
                raise
            error.close()
        headers["Authorization"] = _authorization(challenge, credentials, timeout_s)
        return _digest_at(url, headers, timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        raise _refused(reference, host, error.code) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ToolError(
            f"registry {host} gave no digest for {reference}: {reason}", hint="Is there a network, and a proxy set?"
        ) from error


def _digest_at(url: str, headers: Mapping[str, str], timeout_s: float) -> str:
    for method in ("HEAD", "GET"):
        request = urllib.request.Request(url, headers=dict(headers), method=method)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            digest = answer.headers.get("Docker-Content-Digest", "")
            if _DIGEST.fullmatch(digest):
                return str(digest)
            body = answer.read()
    # The digest is that of the manifest's bytes; registries may leave the header out.
    return "sha256:" + hashlib.sha256(body).hexdigest()


def _authorization(challenge: str, credentials: str, timeout_s: float) -> str:
    kind, _, rest = challenge.partition(" ")
    if kind.lower() == "basic":
        return f"Basic {credentials}"
    facts = dict(re.findall(r'(\w+)="([^"]*)"', rest))
    if "realm" not in facts:
        raise ValueError(f"authentication {kind!r} is not known")
    query = urllib.parse.urlencode({key: facts[key] for key in ("service", "scope") if key in facts})
    headers = {"Authorization": f"Basic {credentials}"} if credentials else {}
    request = urllib.request.Request(f"{facts['realm']}?{query}", headers=headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        document: dict[str, Any] = json.load(answer)
    return f"Bearer {document.get('token') or document.get('access_token') or ''}"


def _parts(reference: str) -> tuple[str, str, str]:
    """Split into registry host, repository and tag; names without a host are Docker Hub's."""
    repository = repository_of(reference)
    tag = reference[len(repository) :].lstrip(":") or "latest"
    host, slash, name = repository.partition("/")
    if slash and ("." in host or ":" in host or host == "localhost"):
        return host, name, tag
    return _DOCKER_HUB, repository if slash else f"library/{repository}", tag


def _scheme(host: str) -> str:
    # Like the engines: a registry of this machine may speak plain HTTP.
    return "http" if host.partition(":")[0] in ("localhost", "127.0.0.1") else "https"


def _credentials(host: str) -> str:
    """Return base64 of ``user:password`` for a registry; empty when nobody logged in."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    files = [
        os.environ.get("REGISTRY_AUTH_FILE", ""),
        f"{os.environ.get('DOCKER_CONFIG') or Path.home() / '.docker'}/config.json",
        f"{runtime}/containers/auth.json",
    ]
    key = "https://index.docker.io/v1/" if host == _DOCKER_HUB else host
    for file in filter(None, files):
        try:
            entries = json.loads(Path(file).read_text(encoding="utf-8")).get("auths", {})
        except (OSError, ValueError, AttributeError):  # another file may have it
            continue
        found = entries.get(key, {}).get("auth", "")
        if found and _is_base64(found):
            return str(found)
    return ""


def _is_base64(text: str) -> bool:
    try:
        return b":" in base64.b64decode(text, validate=True)
    except ValueError:
        return False


def _refused(reference: str, host: str, code: int) -> ToolError:
    if code == 404:
        return ToolError(f"registry {host} has no image {reference}", hint="Check its name and tag.")
    if code in (401, 403):
        return ToolError(f"registry {host} refuses {reference} (HTTP {code})", hint=f"docker login {host}")
    return ToolError(f"registry {host} answered HTTP {code} for {reference}", hint="Try again later.")
