"""A model on the Hugging Face hub, at a commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.spec import Spec
from pipeline.errors import SourceError
from pipeline.stages.base import StageContext, Unresolved
from pipeline.stages.sources.files import copy_file, sha256_file, wanted

_PARALLEL_FILES = 4
# For one answer about a model; the library would wait for ever.
_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    name: str
    size: int | None
    sha256: str | None  # published for large files only


class HubSource:
    """Download through huggingface_hub's own cache, so that files the user already has are not fetched again.

    No token and no network are needed once the cache is complete.
    """

    def __init__(self, spec: Spec) -> None:
        self._id = spec.source.id
        self._revision = spec.source.revision or "main"
        self._commit = self._revision if spec.source.revision_is_pinned else None

    def identity(self, *, resolve: bool) -> Mapping[str, Any]:
        """Return repository and commit; a branch name is looked up when ``resolve`` allows it."""
        if self._commit is None:
            if not resolve:
                raise Unresolved(
                    f"{self._id}@{self._revision} can move; a run looks it up, model.revision=<40 hex digits> pins it"
                )
            self._commit = self._look_up()
        return {"kind": "hub", "id": self._id, "commit": self._commit}

    def fetch(self, context: StageContext) -> None:
        """Download what a conversion needs and check sizes and published digests."""
        commit = self.identity(resolve=True)["commit"]
        files = self._list(commit)
        total = sum(file.size or 0 for file in files)
        done = 0
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            jobs = [pool.submit(self._download, file, commit, context.out / "model") for file in files]
            try:
                for job in jobs:
                    done += job.result().stat().st_size
                    context.progress(done, max(total, done), "bytes")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        context.facts["source"] = {
            "kind": "hub",
            "id": self._id,
            "commit": commit,
            "files": {file.name: sha256_file(context.out / "model" / file.name) for file in files},
        }

    def _look_up(self) -> str:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            with self._advice():
                commit = HfApi().model_info(self._id, revision=self._revision, timeout=_TIMEOUT_S).sha
            if commit is None:
                raise SourceError(f"the hub did not name the commit of {self._id}@{self._revision}")
            return commit
        except _Unreachable as unreachable:
            try:
                cached = snapshot_download(self._id, revision=self._revision, local_files_only=True)
            except LocalEntryNotFoundError:
                raise unreachable.error from unreachable
            return Path(cached).name

    def _list(self, commit: str) -> list[_RemoteFile]:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            with self._advice():
                info = HfApi().model_info(self._id, revision=commit, timeout=_TIMEOUT_S, files_metadata=True)
            found = {
                s.rfilename: _RemoteFile(s.rfilename, s.size, s.lfs.sha256 if s.lfs else None)
                for s in info.siblings or ()
            }
        except _Unreachable as unreachable:
            try:
                cached = Path(snapshot_download(self._id, revision=commit, local_files_only=True))
            except LocalEntryNotFoundError:
                raise unreachable.error from unreachable
            paths = {p.relative_to(cached).as_posix(): p for p in cached.rglob("*") if p.is_file()}
            found = {name: _RemoteFile(name, p.stat().st_size, None) for name, p in paths.items()}
        names = wanted(found)
        if not names:
            raise SourceError(f"{self._id}@{commit} holds no model files")
        return [found[name] for name in names]

    def _download(self, file: _RemoteFile, commit: str, folder: Path) -> Path:
        """Copy one file from the cache; a damaged cached copy is fetched again, once."""
        from huggingface_hub import hf_hub_download

        target = folder / file.name
        for again in (False, True):
            with self._advice(reachable=True):
                cached = hf_hub_download(self._id, file.name, revision=commit, force_download=again)
            copy_file(Path(cached), target)
            problem = _mismatch(target, file)
            if problem is None:
                return target
        raise SourceError(
            f"{self._id}/{file.name}: {problem}, also after it was downloaded again",
            hint="the hub or a proxy serves a damaged file; try again later or another network",
        )

    @contextmanager
    def _advice(self, *, reachable: bool = False) -> Iterator[None]:
        """Turn the hub library's errors into what happened and what to do."""
        from huggingface_hub import constants, errors, get_token

        where = f"{constants.ENDPOINT}/{self._id}"
        try:
            yield
        except errors.GatedRepoError as error:
            done = "the token's account has not been granted access" if get_token() else "no token is set"
            raise SourceError(
                f"{self._id} is gated and {done}",
                hint=f"accept the licence at {where}, then set HF_TOKEN to a token of that account",
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise SourceError(
                f"{self._id} does not exist on the hub, or is private and this token may not see it",
                hint="check model.id" if get_token() else "check model.id; for a private model set HF_TOKEN",
            ) from error
        except errors.RevisionNotFoundError as error:
            raise SourceError(
                f"{self._id} has no revision {self._revision!r}", hint=f"see {where}/tree/main for branches and tags"
            ) from error
        except errors.HFValidationError as error:
            raise SourceError(f"model.id={self._id!r} is not a repository name: expected org/name") from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 403):
                why = "HF_TOKEN is not valid or may not read it" if get_token() else "no token is set"
                raise SourceError(
                    f"the hub refuses {self._id} with status {status}: {why}",
                    hint=f"make a token that may read {where} and set HF_TOKEN",
                ) from error
            answer = SourceError(
                f"{where} answers with status {status}",
                hint="try again later, or use source=local model.path=FOLDER",
            )
            if reachable:
                raise answer from error
            raise _Unreachable(answer) from error
        except (errors.OfflineModeIsEnabled, errors.HTTPError, OSError, ValueError) as error:  # type: ignore[attr-defined]
            message = f"{where} cannot be reached: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            hint = "check the network and HF_ENDPOINT, or use source=local model.path=FOLDER"
            failure = SourceError(message, hint=hint)
            if reachable:
                raise failure from error
            raise _Unreachable(failure) from error


class _Unreachable(Exception):
    """The hub did not answer; the cache may still do. Carries the error to show if it does not."""

    def __init__(self, error: SourceError) -> None:
        super().__init__(error.message)
        self.error = error


def _mismatch(path: Path, file: _RemoteFile) -> str | None:
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return f"{size} bytes, the hub says {file.size}"
    if file.sha256 is not None and (digest := sha256_file(path)) != file.sha256:
        return f"sha256 {digest}, the hub says {file.sha256}"
    return None
