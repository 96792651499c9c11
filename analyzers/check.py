"""Check a safetensors checkpoint against the model, or alone: names, shapes, dtypes and bytes, from the headers only.

CHECKPOINT is a .safetensors file, a folder, an index.json (names and total size only) or a Hub id, whose headers are
fetched by range requests. With one argument the model is the config beside the files, an adapter's base, or the
repository's own; without any config the files are judged alone. What would load is what transformers' own conversion,
quantiser and loader take on the meta device. No weight is read, except to compare data that is stored twice; nothing
outside the folder is opened, and never a pickle.

Totals: tensors (names), missing, unexpected, shape_mismatch, dtype_mismatch (tensors; null without a model), bytes (of
the tensors, each name once; of an index alone its total_size), files; errors, warnings, notes (before folding).

Exit code 0: clean (notes at most); 1: an error or a warning; 2: some file could not be read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from introspect.analyzers._check_files import file_findings
from introspect.analyzers._check_model import checkpoint_bytes, model_findings
from introspect.analyzers._findings import findings_table
from introspect.check_kinds import KINDS
from introspect.check_record import CheckParams, CheckRecord, LoadRecord
from introspect.collector import no_collection
from introspect.packed import parts_of
from introspect.table import Result, Value

MODELS = "none"
GATHER = "checking"
EXAMPLES = (
    "introspect check meta-llama/Meta-Llama-3-8B ./Meta-Llama-3-8B",
    "introspect check ./my-finetune",
    "introspect check mistralai/Mixtral-8x7B-v0.1 model.safetensors.index.json",
    "introspect check ./my-finetune --fix-index model.safetensors.index.json.new",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(CheckParams):
    """See CheckParams."""


def analyze(params: Params, record: CheckRecord) -> Result:
    """Findings of one checkpoint, most serious first, folded over layers."""
    load = record.load
    with no_collection():
        findings = list(file_findings(record))
        if load is not None:
            findings += model_findings(record, load)
        counts: Counter[str] = Counter()  # by kind and by severity
        for finding in findings:
            counts[finding.kind] += finding.count
            counts[KINDS[finding.kind].severity] += finding.count
        table, left_out = findings_table(findings)
        return Result(
            command="check",
            model=None if load is None else _model(load),
            totals=_totals(record, counts) | {f"{name}s": counts[name] for name in ("error", "warning", "note")},
            tables={"findings": table},
            notes=tuple(_notes(record, counts, left_out)),
            findings=bool(counts["error"] or counts["warning"]),
            unreadable=any(KINDS[finding.kind].unreadable for finding in findings),
        )


def _model(load: LoadRecord) -> dict[str, Value]:
    return {
        "id": load.model.id,
        "class": load.model.class_name,
        "source": load.model.source,
        "config_sha256": load.model.config_sha256,
    }


def _totals(record: CheckRecord, counts: Counter[str]) -> dict[str, Value]:
    compared = record.load is not None
    return {
        "tensors": len(parts_of(record.checkpoint)),
        "missing": counts["missing"] + counts["packed_incomplete"] if compared else None,
        "unexpected": counts["unexpected"] if compared else None,
        "shape_mismatch": counts["shape"] + counts["packed_shape"] if compared else None,
        "dtype_mismatch": counts["dtype"] + counts["dtype_kind"] if compared else None,
        "bytes": checkpoint_bytes(record),
        "files": len(record.checkpoint.headers) + len(record.checkpoint.unread),
    }


def _notes(record: CheckRecord, counts: Counter[str], left_out: int) -> list[str]:
    checkpoint, load = record.checkpoint, record.load
    notes = [f"checkpoint: {checkpoint.source}"]
    if load is not None:
        notes += [f"compared by {load.route}", *load.notes]
    elif checkpoint.adapter_config is not None:
        notes.append("an adapter without its base model: the files were judged alone")
    else:
        notes.append("no model was given and no config lies beside the files: they were judged alone")
    if checkpoint.kind == "index":
        notes.append("an index holds names and a total size only: no shape, dtype or byte of a tensor was seen")
        if load is not None and load.expected_bytes is None:
            notes.append("total_size was not compared: some of these tensors have sizes only their headers know")
    if checkpoint.unread and load is not None and checkpoint.index is not None:
        notes.append("tensors of the files that could not be read are taken to be as the index says")
    if record.index_written is not None:
        notes.append(f"corrected index written to {record.index_written}")
    if left_out:
        notes.append(f"{left_out:,} more rows, the least serious, are left out; the totals count them")
    if not counts["error"] and not counts["warning"]:
        notes.append("clean: no error, no warning")
    return notes
