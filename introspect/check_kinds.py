"""Everything `check` can find: how serious it is, what usually causes it and what to do, most serious first.

error: the file cannot be read or the model would not get what it needs. warning: it loads, but not as the files say.
note: worth knowing, nothing to mend; notes leave a checkpoint clean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of finding. `unreadable`: the file's content is unknown, so that the answer has a gap (exit code 2)."""

    name: str
    severity: Severity
    cause: str
    remedy: str
    unreadable: bool = False


def _unreadable(name: str, cause: str, remedy: str) -> Kind:
    return Kind(name, "error", cause, remedy, unreadable=True)


_AGAIN = "download the file again and compare its digest"
_REWRITE = "write the file again with safetensors' own save_file"
_FIX_INDEX = "write a new index with --fix-index"

_ALL = (
    _unreadable(
        "pickle_file", "a pickle under the name of a safetensors file", "convert it to safetensors where you trust it"
    ),
    _unreadable(
        "zip_file", "an archive or a torch.save file under this name", "convert it to safetensors where you trust it"
    ),
    _unreadable("lfs_pointer", "cloned without Git LFS", "run `git lfs pull` in the clone"),
    _unreadable("web_page", "an error or login page saved in place of the file", "log in and download the file again"),
    _unreadable(
        "index_as_weights", "an index or config under the name of a weight file", "give the .safetensors file itself"
    ),
    _unreadable("other_format", "another format under the name of a safetensors file", "give the safetensors file"),
    _unreadable("empty_file", "a download that never started, or a full disk", _AGAIN),
    _unreadable("header_too_short", "a download that broke off", _AGAIN),
    _unreadable("header_beyond_file", "a download that broke off, or no safetensors file", _AGAIN),
    _unreadable(
        "header_too_large",
        "damaged bytes, or a file made to exhaust memory",
        "do not load it; get it from its source again",
    ),
    _unreadable("header_not_utf8", "damaged bytes, or names in another encoding", _AGAIN),
    _unreadable("header_not_json", "damaged bytes, or a writer that does not follow the format", _AGAIN),
    _unreadable("header_not_object", "a writer that does not follow the format", _REWRITE),
    _unreadable("not_a_file", "a folder or special file under the name of a shard", "put the shard there"),
    _unreadable("unreadable", "permissions, a broken or circular link, or a failing disk", "make the file readable"),
    _unreadable(
        "leaves_folder", "a link or an index entry that leads out of the folder", "copy the file into the folder"
    ),
    _unreadable("missing_file", "an incomplete download or copy", "fetch the missing shard"),
    _unreadable("not_served", "the server or the network", "try again later"),
    Kind("truncated", "error", "a download or copy that broke off", _AGAIN),
    Kind("bad_entry", "error", "a writer that does not follow the format", _REWRITE),
    Kind(
        "unknown_dtype",
        "error",
        "a newer format, or damaged bytes",
        "check the writer's version; transformers cannot load it",
    ),
    Kind("bad_shape", "error", "damaged bytes, or a file made to confuse", _REWRITE),
    Kind("bad_offsets", "error", "damaged bytes, or a file made to confuse", _REWRITE),
    Kind("byte_size", "error", "a wrong dtype or shape in the header, or damaged bytes", _REWRITE),
    Kind("overlap", "error", "two tensors written to one place, or a file made to confuse", _REWRITE),
    Kind("gap", "error", "bytes that no tensor claims: a tensor cut out, or data hidden in the file", _REWRITE),
    Kind("trailing_bytes", "error", "data appended after the last tensor, or a tensor cut from the header", _REWRITE),
    Kind("duplicate_name", "error", "a file made by hand: readers disagree on which one counts", _REWRITE),
    Kind("bad_metadata", "error", "a writer that stored other things than text", _REWRITE),
    Kind("refused", "error", "the safetensors library does not accept the file", _REWRITE),
    Kind(
        "missing",
        "error",
        "never written, or written under another name",
        "the parameter would stay at random values: get the whole checkpoint",
    ),
    Kind("shape", "error", "made for another config", "use the config this checkpoint was made with"),
    Kind(
        "conversion",
        "error",
        "transformers cannot assemble the parameter from these tensors",
        "compare the tensors of this parameter with the model's own save_pretrained",
    ),
    Kind(
        "packed_incomplete",
        "error",
        "a quantised matrix that lost one of its parts",
        "quantise again, or get the whole checkpoint",
    ),
    Kind(
        "packed_shape",
        "error",
        "parts of two quantisations, or of another group size",
        "quantise again with one setting",
    ),
    Kind(
        "dtype_kind",
        "error",
        "stored as another kind of number than the model computes with",
        "name the quantisation in config.json, or dequantise",
    ),
    Kind(
        "duplicate_differs",
        "error",
        "two shards of different states in one folder",
        "keep one and write a new index with --fix-index",
    ),
    Kind("missing_shard", "error", "an incomplete download or copy", "fetch the missing shard"),
    Kind("unindexed", "error", "an index older than the shards", _FIX_INDEX),
    Kind("not_in_shard", "error", "an index older than the shards, or a shard of another save", _FIX_INDEX),
    Kind("wrong_shard", "error", "an index older than the shards", _FIX_INDEX),
    Kind("bad_index", "error", "an index made by hand or damaged", _FIX_INDEX),
    Kind(
        "unexpected",
        "warning",
        "belongs to another class or a changed architecture",
        "check that the config's class is the intended one: these weights are not used",
    ),
    Kind(
        "duplicate",
        "warning",
        "one save written into the folder of another",
        "keep one and write a new index with --fix-index",
    ),
    Kind(
        "tied_differs",
        "warning",
        "trained untied, but the config says tied",
        "set tie_word_embeddings to false, else they are tied or not by library version",
    ),
    Kind("no_index", "warning", "shards copied without their index: no library finds them", _FIX_INDEX),
    Kind("total_size", "warning", "an index of another save, or a writer that counts otherwise", _FIX_INDEX),
    Kind(
        "dtype",
        "warning",
        "saved in another precision than the config says",
        "set dtype in config.json, or cast and save again",
    ),
    Kind("mixed_dtype", "warning", "layers saved in different precision", "cast to one dtype and save again"),
    Kind("bad_name", "warning", "control characters or an empty name", "rename the tensor and save again"),
    Kind(
        "stray_file",
        "note",
        "another format of the same weights, or a leftover",
        "nothing: it is not in the index and was not read",
    ),
    Kind("tied_stored", "note", "saved although it is tied", "nothing; leaving it out saves its bytes"),
    Kind("ignored", "note", "stored, and by design not loaded by this class", "nothing"),
    Kind("packed", "note", "a quantised layout", "nothing"),
    Kind(
        "alignment",
        "note",
        "a writer that does not pad; readers copy instead of map",
        "nothing, or save again with safetensors' own save_file",
    ),
    Kind("metadata", "note", "unusual metadata", "nothing"),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}
ORDER: dict[str, int] = {kind.name: place for place, kind in enumerate(_ALL)}
