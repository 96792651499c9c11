"""The Hugging Face Hub and its local cache: the small files of one repository, and precise words when they do not come.

huggingface_hub is imported late: a model found elsewhere must not pay for it. The token comes from where that library
looks (HF_TOKEN, the file `hf auth login` writes); HF_ENDPOINT names another server, HF_HUB_OFFLINE forbids asking any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import TypeVar

from introspect import catalog
from introspect.errors import (
    ConfigFileError,
    FileAccessError,
    GatedModelError,
    HubError,
    IntrospectError,
    ModelNotFoundError,
    RevisionNotFoundError,
)
from introspect.strict_json import MAX_BYTES

T = TypeVar("T")
ATTEMPTS = 3
LONGEST_PAUSE = 10.0  # seconds; a server that asks for more is reported instead of waited for
RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
CODE_PATTERN = "*.py"


def offline_asked(offline: bool) -> bool:
    """Whether the network may not be used: asked for here, or by HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return offline or any(os.environ.get(name, "").lower() in {"1", "true", "yes", "on"} for name in names)


def cached_config(model: str, revision: str | None) -> Path | None:
    """The config.json of this repository in the local Hub cache, inside its snapshot folder; None when not cached."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError as error:
        raise ModelNotFoundError(model, f"not a Hub id: {error}", catalog.nearest(model)) from None
    return Path(found) if isinstance(found, str) else None


def download_config(model: str, revision: str | None) -> Path:
    """Fetch config.json, and hf_quant_config.json where there is one, into the Hub cache; the path of the first."""
    size = _ask(model, revision, lambda: _size(model, revision))
    if size is not None and size > MAX_BYTES:
        raise ConfigFileError(f"{model}/config.json", f"{size} bytes on the Hub", f"a config of at most {MAX_BYTES}")
    config = _ask(model, revision, lambda: _download(model, "config.json", revision))
    _ask(model, revision, lambda: _download_if_there(model, "hf_quant_config.json", revision))
    return config


def download_code(model: str, revision: str | None) -> Path:
    """Fetch the Python files of a repository whose code the user trusts, beside its config.json; the folder."""
    from huggingface_hub import snapshot_download

    with _without_progress_bars():
        folder = _ask(
            model,
            revision,
            lambda: snapshot_download(
                model, revision=revision, allow_patterns=["config.json", CODE_PATTERN], endpoint=_endpoint()
            ),
        )
    return Path(folder)


def list_files(model: str, revision: str | None) -> tuple[str, tuple[str, ...]]:
    """(commit, names of all files) of a repository: one request. The commit pins what is read next to one state."""
    from huggingface_hub import HfApi

    info = _ask(model, revision, lambda: HfApi(endpoint=_endpoint()).model_info(model, revision=revision, timeout=10))
    return info.sha or revision or "main", tuple(file.rfilename for file in info.siblings or ())


def file_url(model: str, file: str, commit: str) -> str:
    """Where the Hub serves a file of a repository."""
    from huggingface_hub import hf_hub_url

    return hf_hub_url(model, file, revision=commit, endpoint=_endpoint())


def cached_folder(model: str, revision: str | None, files: Iterable[str]) -> Path | None:
    """The snapshot folder of the local Hub cache that holds the first of `files` there is; None when it holds none."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    found = (try_to_load_from_cache(model, file, revision=revision) for file in files)
    try:
        return next((Path(path).parent for path in found if isinstance(path, str)), None)
    except HFValidationError as error:
        raise ModelNotFoundError(model, f"not a Hub id: {error}", catalog.nearest(model)) from None


def _size(model: str, revision: str | None) -> int | None:
    from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_url

    url = hf_hub_url(model, "config.json", revision=revision, endpoint=_endpoint())
    return get_hf_file_metadata(url, token=get_token(), endpoint=_endpoint()).size


def _download(model: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    with _without_progress_bars():
        return Path(hf_hub_download(model, file, revision=revision, endpoint=_endpoint()))


def _download_if_there(model: str, file: str, revision: str | None) -> Path | None:
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        return _download(model, file, revision)
    except RemoteEntryNotFoundError:
        return None


def _ask(model: str, revision: str | None, request: Callable[[], T]) -> T:
    """Run `request`, again after a pause when the server is busy; its failures in this package's words."""
    from huggingface_hub.errors import HfHubHTTPError

    for attempt in range(1, ATTEMPTS + 1):
        try:
            return request()
        except HfHubHTTPError as error:
            pause = _pause(error.response.headers.get("Retry-After"), attempt)
            if error.response.status_code not in RETRIED_STATUS or attempt == ATTEMPTS or pause > LONGEST_PAUSE:
                raise _translate(error, model, revision) from None
            sleep(pause)
        except Exception as error:
            if type(error).__module__.partition(".")[0] in {"httpx", "httpx2", "huggingface_hub"}:
                raise _translate(error, model, revision) from None
            if isinstance(error, OSError):
                path, problem = str(error.filename or "the Hub cache"), error.strerror or str(error)
                raise FileAccessError(path, "write", problem) from None
            raise
    raise AssertionError("the last attempt returns or raises")


def _pause(retry_after: str | None, attempt: int) -> float:
    return float(retry_after) if retry_after and retry_after.isdigit() else float(2 ** (attempt - 1))


def _translate(error: Exception, model: str, revision: str | None) -> IntrospectError:
    from huggingface_hub import errors, get_token

    if isinstance(error, errors.GatedRepoError):
        return GatedModelError(model, has_token=get_token() is not None)
    if isinstance(error, errors.RepositoryNotFoundError):
        remedy = "if it is private, set HF_TOKEN to a token that may read it"
        return ModelNotFoundError(model, _LOOKED + "the Hub has no such repository", catalog.nearest(model), remedy)
    if isinstance(error, errors.RevisionNotFoundError):
        return RevisionNotFoundError(model, revision or "main")
    if isinstance(error, errors.EntryNotFoundError) and isinstance(error, errors.HfHubHTTPError):
        found = "the repository has no config.json (a GGUF, adapter or diffusers repository?)"
        return ConfigFileError(model, found, "a transformers model repository")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        remedy = "wait and try again" if status in RETRIED_STATUS else "check the token and the address"
        return HubError(model, f"the Hub at {_address()} answered {status} {error.response.reason_phrase}", remedy)
    cause = error.__cause__ or error
    remedy = "check network, proxy and HF_ENDPOINT, give a local config.json, or see `introspect models`"
    if near := catalog.nearest(model):  # a slip in the name of a built-in model would have needed no network
        remedy += f"; did you mean {' or '.join(near)}?"
    first_line = str(cause).strip().partition("\n")[0]
    return HubError(model, f"no answer from {_address()} ({type(cause).__name__}: {first_line})", remedy)


_LOOKED = "not a path, not in the built-in catalog or the local Hub cache, and "


def offline_error(model: str, revision: str | None) -> IntrospectError:
    """What to say when only the network could answer and it may not be asked."""
    remedy = "drop --offline (and HF_HUB_OFFLINE) to ask the Hub"
    if revision is not None:
        return HubError(model, f"revision {revision!r} is not in the local Hub cache, and offline", remedy)
    return ModelNotFoundError(model, _LOOKED + "offline", catalog.nearest(model), remedy)


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _address() -> str:
    from huggingface_hub.constants import ENDPOINT

    return _endpoint() or ENDPOINT


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """A config arrives in one packet: a bar for it is noise. Left as it was afterwards."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    was_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_disabled:
            enable_progress_bars()
