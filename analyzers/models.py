"""List the models whose configs are built in; they need no token and no network.

Each config is the Hub's config.json, byte for byte as the public repository `source` keeps it. `params` is
what a plain build counts (tied weights once, quantised weights unpacked), so it can differ from the total a checkpoint
publishes. Any other model is found by its Hub id, a folder or a config.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from introspect.catalog import Entry, entries, nearest
from introspect.params import option
from introspect.table import Result, Table, Value

MODELS = "none"
EXAMPLES = ("introspect models", "introspect models llama", "introspect models qwen3 --format csv")

UNITS = {"id": "", "class": "", "params": "", "source": "", "aliases": "", "note": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Which of them."""

    search: str | None = option(None, "part of an id, alias, class or model_type", positional=True)


def analyze(params: Params) -> Result:
    """One row a model, in order of id. Searching for nothing that is there names the nearest ids in a note."""
    wanted = (params.search or "").lower()
    rows = tuple(_row(entry) for entry in entries() if wanted in _text(entry))
    notes = () if rows else (f"no built-in model matches {params.search!r}" + _nearest(wanted),)
    return Result(command="models", tables={"models": Table(units=UNITS, rows=rows)}, notes=notes)


def _text(entry: Entry) -> str:
    return " ".join([*entry.names, entry.class_name, entry.architecture, entry.model_type]).lower()


def _nearest(name: str) -> str:
    ids = nearest(name)
    return f"; did you mean {' or '.join(ids)}?" if ids else ""


def _row(entry: Entry) -> dict[str, Value]:
    return {
        "id": entry.id,
        "class": entry.class_name,
        "params": entry.params,
        "source": entry.source,
        "aliases": ", ".join(entry.aliases),
        "note": entry.note,
    }
