"""What MODEL means: a path, a factory in a Python file, the built-in catalog, the local Hub cache, or the Hub.

`resolve` reads the config and says where it came from; nothing is built and torch is not imported. Files are data: no
pickle is opened, and no code of a repository is fetched or named for use unless the user trusts it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from introspect import catalog, hub
from introspect.errors import ConfigError, ConfigFileError, FileAccessError, ModelNotFoundError, OptionError
from introspect.strict_json import MAX_BYTES, JsonProblem, parse_object

Kind = Literal["file", "directory", "factory", "catalog", "cache", "hub", "object"]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
FILE_SUFFIXES = frozenset({".json", ".py", ".gguf", ".safetensors", ".bin", ".pt"})
MODEL_FORMS = "a config.json, a folder with one, a Hub id, or file.py:factory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model that was found and not yet built.

    `config` is the raw config as read ({} for a factory) and `config_sha256` the digest of its file (of the Python file
    for a factory). `hf_quant_config` is the quantiser's file beside it, where there is one. `directory` holds the
    config on this machine (None: catalog). `remote_code`: build with the Python files in `directory` that the config's
    auto_map names; only ever True when the user asked for it. `offline`: the network may not be used for it. `digest`
    covers all that was read, code included; only `stable` sources may be answered from a stored trace.
    """

    id: str
    kind: Kind
    text: str
    config: dict[str, Any]
    config_sha256: str
    digest: str
    directory: Path | None = None
    hf_quant_config: dict[str, Any] | None = None
    remote_code: bool = False
    factory: str | None = None
    offline: bool = False

    @property
    def stable(self) -> bool:
        """Whether equal digests mean equal models: not for what a factory or another repository's code may do."""
        elsewhere = self.remote_code and "--" in str(self.config.get("auto_map"))
        return self.factory is None and not elsewhere


def resolve(
    model: str, *, revision: str | None = None, offline: bool = False, trust_remote_code: bool = False
) -> Source:
    """Find MODEL: an existing path, `file.py:factory`, the catalog, the local Hub cache, the Hub, in this order.

    A revision is a question to the repository: the catalog, which holds one copy, does not answer it. Raises a child of
    IntrospectError that says what was found, what was expected and what to do.
    """
    offline = hub.offline_asked(offline)
    path = Path(os.path.expanduser(model))
    status = _status(path) if model else None  # Path("") is the working directory
    file, _, factory = model.rpartition(":")
    is_factory = status is None and file.endswith(".py") and factory.isidentifier()
    if (status is not None or is_factory) and revision is not None:
        raise OptionError("--revision", revision, f"no revision: {model} is a path, and only Hub models have any")
    if status is not None:
        return _from_path(model, path, status, trust_remote_code, offline)
    if is_factory:
        return _from_factory(model, Path(os.path.expanduser(file)), factory)
    if not HUB_ID.fullmatch(model) or path.suffix in FILE_SUFFIXES:
        raise ModelNotFoundError(model, f"no such file or folder, and not a Hub id; expected {MODEL_FORMS}")
    if revision is None and (entry := catalog.find(model)) is not None:
        return _from_catalog(entry)
    return _from_hub(model, revision, trust_remote_code, offline)


def _status(path: Path) -> os.stat_result | None:
    """What stands at `path`, or None when nothing does. A link that leads nowhere is an error, not an absence."""
    try:
        return path.stat()
    except ValueError:  # a null byte
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigFileError(str(path), "a symbolic link that leads back to itself", MODEL_FORMS) from None
        if error.errno == errno.ENOENT and path.is_symlink():
            target = os.readlink(path)
            raise ConfigFileError(str(path), f"a symbolic link to {target}, which is missing", MODEL_FORMS) from None
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}:
            return None
        raise FileAccessError(str(path), "read", error.strerror or str(error)) from None


def _from_path(model: str, path: Path, status: os.stat_result, trust: bool, offline: bool) -> Source:
    if stat.S_ISDIR(status.st_mode):
        config = path / "config.json"
        if _status(config) is None:
            raise ConfigFileError(str(path), f"a folder without config.json ({_listing(path)})", "config.json in it")
        return _from_config(config, id=model, kind="directory", text=f"directory {model}", trust=trust, offline=offline)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigFileError(model, "no regular file (a pipe, socket or device)", MODEL_FORMS)
    if path.suffix == ".py":
        raise ConfigFileError(model, "a Python file", f"the name of a factory in it, as {model}:build")
    if path.suffix != ".json":
        raise ConfigFileError(model, _guess(path), MODEL_FORMS)
    return _from_config(path, id=model, kind="file", text=f"file {model}", trust=trust, offline=offline)


def _from_factory(model: str, path: Path, factory: str) -> Source:
    if _status(path) is None:
        raise ModelNotFoundError(model, f"no such file: {path}")
    digest = sha256(_read(path)).hexdigest()
    text = f"factory {factory} of {path}"
    return Source(
        id=model,
        kind="factory",
        text=text,
        config={},
        config_sha256=digest,
        digest=digest,
        directory=path.parent,
        factory=factory,
    )


def _from_catalog(entry: catalog.Entry) -> Source:
    data = catalog.read(entry.file)
    quant = catalog.read(entry.quant_file) if entry.quant_file else None
    config_sha256 = sha256(data).hexdigest()
    return Source(
        id=entry.id,
        kind="catalog",
        text=f"built-in catalog (copied from {entry.source})",
        config=json.loads(data),
        config_sha256=config_sha256,
        digest=_digest(data, quant),
        hf_quant_config=None if quant is None else json.loads(quant),
    )


def _from_hub(model: str, revision: str | None, trust: bool, offline: bool) -> Source:
    kind: Kind = "cache"
    path = hub.cached_config(model, revision)
    if path is None:
        if offline:
            raise hub.offline_error(model, revision)
        kind = "hub"
        path = hub.download_config(model, revision)
    if trust and not offline and any(not (path.parent / file).is_file() for file in _code_files(_object(path))):
        hub.download_code(model, revision)
    text = f"{'local Hub cache' if kind == 'cache' else 'Hugging Face Hub'} (commit {path.parent.name})"
    return _from_config(path, id=model, kind=kind, text=text, trust=trust, offline=offline)


def _from_config(path: Path, *, id: str, kind: Kind, text: str, trust: bool, offline: bool) -> Source:
    data = _read(path)
    config = _object(path, data)
    _require_architecture(path, config)
    quant_path = path.with_name("hf_quant_config.json")
    quant = _read(quant_path) if path.name == "config.json" and _status(quant_path) else None
    code = _code_files(config) if trust else ()
    for file in code:
        if _status(path.with_name(file)) is None:
            raise ConfigFileError(str(path), f"auto_map names {file}, which is not beside it", "the code it names")
    remote_code = bool(trust and config.get("auto_map"))
    everything = [_read(file) for file in sorted(path.parent.glob(hub.CODE_PATTERN))] if code else []
    return Source(
        id=id,
        kind=kind,
        text=text,
        config=config,
        config_sha256=sha256(data).hexdigest(),
        digest=_digest(data, quant, *([b"remote code"] if remote_code else []), *everything),
        directory=path.parent,
        hf_quant_config=None if quant is None else _object(quant_path, quant),
        remote_code=remote_code,
        offline=offline,
    )


def _require_architecture(path: Path, config: dict[str, Any]) -> None:
    """Refuse JSON that is no model config, in terms of what it looks like."""
    if "weight_map" in config:
        raise ConfigFileError(str(path), "a checkpoint index", "the config.json beside it")
    if {"introspect", "command", "totals"} <= config.keys():
        found = f"an answer of `introspect {config['command']}`, which holds no record"
        raise ConfigFileError(str(path), found, "a model, or a trace written by introspect.save_trace")
    if config.get("model_type") is None and not config.get("architectures"):
        raise ConfigFileError(str(path), "names neither model_type nor architectures", "a transformers config.json")
    if not isinstance(config.get("model_type", ""), str | None):
        raise ConfigError(str(path), "model_type", config["model_type"], "a string such as 'llama'")
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError(str(path), "architectures", names, "a list of class names such as ['LlamaForCausalLM']")


def _code_files(config: dict[str, Any]) -> tuple[str, ...]:
    """Files beside config.json that its auto_map names ("modeling_x.XForCausalLM"; "owner/name--..." is elsewhere)."""
    auto_map = config.get("auto_map")
    values = auto_map.values() if isinstance(auto_map, dict) else ()
    names = [name for value in values for name in (value if isinstance(value, list) else [value])]
    local = (name for name in names if isinstance(name, str) and "--" not in name)
    return tuple(dict.fromkeys(f"{name.partition('.')[0]}.py" for name in local))


def _object(path: Path, data: bytes | None = None) -> dict[str, Any]:
    try:
        return parse_object(_read(path) if data is None else data)
    except JsonProblem as problem:
        raise ConfigFileError(str(path), str(problem), "one JSON object, a transformers config.json") from None


def _read(path: Path) -> bytes:
    """The bytes of a regular file of at most MAX_BYTES + 1 (enough to see that it is too large)."""
    status = _status(path)
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise ConfigFileError(str(path), "not a regular file", MODEL_FORMS)
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise FileAccessError(str(path), "read", error.strerror or str(error)) from None


def _digest(*parts: bytes | None) -> str:
    """One digest of several files: of their digests, so that no text can move from one to the next unseen."""
    return sha256(b"".join(b"-" if part is None else sha256(part).digest() for part in parts)).hexdigest()


def _listing(folder: Path) -> str:
    try:
        names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    except OSError as error:
        raise FileAccessError(str(folder), "read", error.strerror or str(error)) from None
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"it holds {shown}" if names else "it is empty"


def _guess(path: Path) -> str:
    """What a file that is not JSON by name looks like, from its first bytes; nothing is unpacked."""
    head = _read(path)[:4]
    if head == b"GGUF":
        return "a GGUF file, which names no transformers class"
    if head[:1] == b"\x80" or head[:2] == b"PK":
        return "a pickled checkpoint, which is never opened"
    if path.suffix == ".safetensors":
        return "a safetensors file: weights without their config"
    return "a file whose name does not end in .json"
