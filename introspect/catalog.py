"""The built-in catalog: configs of popular models, so that a gated one needs neither token nor network.

`data/catalog.json` says of each config where it was copied from; `data/configs/` holds the files as they were found,
byte for byte. `params` is what a plain build on the meta device counts (tied weights once), which is not always the
total a checkpoint publishes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model of the catalog.

    `file` and `quant_file` (a hf_quant_config.json beside it, or None) are names in `data/configs/`; `sha256` is the
    digest of `file`. `fidelity`: "hf-mirror" (a git mirror of the Hub repository) or "vendored-verbatim" (the file
    inside another project). `source` is that repository and path; `note` says what is known to differ.
    """

    id: str
    file: str
    sha256: str
    class_name: str
    architecture: str
    model_type: str
    params: int
    fidelity: str
    source: str
    aliases: tuple[str, ...] = ()
    quant_file: str | None = None
    note: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The id and every other spelling that finds this entry."""
        return (self.id, *self.aliases)


@cache
def entries() -> tuple[Entry, ...]:
    """Every entry, in order of id."""
    rows = json.loads((_data() / "catalog.json").read_text(encoding="utf-8"))
    return tuple(Entry(**{**row, "aliases": tuple(row.get("aliases", ()))}) for row in rows)


def find(name: str) -> Entry | None:
    """The entry with this id or alias, upper and lower case alike; None when there is none."""
    return _index().get(name.lower())


def nearest(name: str, count: int = 3) -> tuple[str, ...]:
    """Ids that come close to `name`, the closest first: by the whole name, else by its last part."""
    index = _index()
    tails = {key.rpartition("/")[2]: key for key in reversed(index)}
    keys = get_close_matches(name.lower(), index, n=count, cutoff=0.6)
    keys += [tails[tail] for tail in get_close_matches(name.lower().rpartition("/")[2], tails, n=count, cutoff=0.6)]
    return tuple(dict.fromkeys(index[key].id for key in keys))[:count]


def read(file: str) -> bytes:
    """The bytes of a config of the catalog (`Entry.file` or `Entry.quant_file`)."""
    return (_data() / "configs" / file).read_bytes()


@cache
def _index() -> dict[str, Entry]:
    return {name.lower(): entry for entry in entries() for name in entry.names}


def _data() -> Traversable:
    return files("introspect") / "data"
