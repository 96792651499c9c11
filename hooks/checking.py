"""What the command `check` needs: the checkpoint's headers, and what transformers' loader makes of them.

torch is imported only when there is a model to compare with.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from introspect import hub
from introspect.check_record import CheckParams, CheckRecord, LoadRecord
from introspect.checkpoint import (
    ADAPTER,
    FORMS,
    INDEX,
    INDEX_SUFFIX,
    SINGLE,
    Checkpoint,
    Say,
    read_local,
    refuse_pickle,
)
from introspect.collector import no_collection
from introspect.errors import CheckpointError, OptionError
from introspect.fixed_index import write_fixed_index
from introspect.packed import Packed, find_packed, parts_of
from introspect.progress import progress
from introspect.sources import HUB_ID, resolve
from introspect.stored_bytes import compare_bytes


def gather(params: CheckParams) -> CheckRecord:
    """Read the checkpoint, load its headers into the model if there is one, compare what is stored twice."""
    with progress("checking") as say, no_collection():
        model, name = _what(params)
        checkpoint = read_checkpoint(name, params, say)
        model = model or _own_model(params, name, checkpoint)
        written = write_fixed_index(checkpoint, Path(params.fix_index)) if params.fix_index else None
        load = None
        if model is not None and not params.files_only:
            say(f"loading the headers into {model}")
            load = _load(model, params, checkpoint)
        return CheckRecord(
            checkpoint=checkpoint,
            load=load,
            packed=_packed(checkpoint, load),
            compared=compare_bytes(checkpoint, load.ties if load else ()),
            index_written=written,
        )


def _what(params: CheckParams) -> tuple[str | None, str]:
    """(MODEL, CHECKPOINT) as given. One argument alone is the checkpoint, or a config beside its checkpoint."""
    if params.model is None and params.checkpoint is None:
        raise OptionError("CHECKPOINT", None, FORMS)
    if params.checkpoint is not None:
        return params.model, params.checkpoint
    given = str(params.model)
    path = Path(given).expanduser()
    if path.is_file() and path.suffix == ".json" and not path.name.endswith(INDEX_SUFFIX):
        return given, str(path.parent)
    return None, given


def read_checkpoint(name: str, params: CheckParams, say: Say) -> Checkpoint:
    """The checkpoint called `name`: a path, else a snapshot of the local Hub cache, else the Hub."""
    if _is_here(name):
        return read_local(Path(name).expanduser(), say)
    refuse_pickle(name)
    if not HUB_ID.fullmatch(name) or name.endswith((".safetensors", ".json")):
        raise CheckpointError(name, "no such file or folder, and not a Hub id", f"give {FORMS}")
    offline = hub.offline_asked(params.offline)
    folder = hub.cached_folder(name, params.revision, (SINGLE, INDEX, ADAPTER))
    if folder is not None:
        cached = replace(read_local(folder, say), source=f"local Hub cache of {name} (commit {folder.name[:12]})")
        if offline or not cached.unread:
            return cached
    if offline:
        raise hub.offline_error(name, params.revision)
    from introspect.remote_headers import read_hub

    return read_hub(name, params.revision, say)


def _is_here(name: str) -> bool:
    path = Path(name).expanduser()
    try:
        return path.exists() or path.is_symlink()
    except (OSError, ValueError):  # too long a name, a null byte
        return False


def _own_model(params: CheckParams, name: str, checkpoint: Checkpoint) -> str | None:
    """The model that comes with a checkpoint: an adapter's base, the config beside the files, the repository's own."""
    if params.files_only:
        return None
    if checkpoint.adapter_config is not None:
        base = checkpoint.adapter_config.get("base_model_name_or_path")
        if isinstance(base, str) and ".py:" in base:  # a file may name a model, not code to run
            raise CheckpointError(name, f"an adapter whose base is code: {base}", "give the base model as MODEL")
        return base if isinstance(base, str) and base else None
    if not _is_here(name):
        return name
    config = checkpoint.folder / "config.json" if checkpoint.folder is not None else None
    return str(config) if config is not None and config.is_file() else None


def _load(model: str, params: CheckParams, checkpoint: Checkpoint) -> LoadRecord:
    source = resolve(
        model,
        revision=None if _is_here(model) else params.revision,
        offline=params.offline,
        trust_remote_code=params.trust_remote_code,
    )
    if checkpoint.adapter_config is not None:
        from introspect.hooks.adapters import compare_adapter

        return compare_adapter(source, checkpoint)
    from introspect.hooks.loading import compare

    return compare(source, checkpoint)


def _packed(checkpoint: Checkpoint, load: LoadRecord | None) -> tuple[Packed, ...]:
    """Quantised layouts, where the quantiser itself did not already vouch for them."""
    if load is not None and load.fits and load.parts_checked:
        return ()
    return find_packed(parts_of(checkpoint), load.packed_bits if load else None)
