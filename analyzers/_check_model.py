"""What does not fit between a checkpoint and the model, as findings with their causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from introspect.analyzers._check_causes import Cause, name_causes, shape_causes
from introspect.analyzers._check_files import describe_packed, file_of, stored_bytes
from introspect.analyzers._findings import Finding
from introspect.check_record import CheckRecord, LoadRecord, WrongDtype
from introspect.packed import Packed
from introspect.safetensors_header import SHORT_NAMES

_FLOATS = frozenset({"fp64", "fp32", "fp16", "bf16"})


def model_findings(record: CheckRecord, load: LoadRecord) -> Iterator[Finding]:
    """Everything the loader complained about, and what it passed over in silence."""
    files = file_of(record.checkpoint)
    packed = {part: one for one in record.packed for part in one.parts}
    yield from _names(record, load, files, packed)
    yield from _shapes(record, load, files, packed)
    for failure in load.failures:
        found = f"{len(failure.names)} tensors, {failure.names[0]} first: {failure.reason}"
        yield Finding(
            kind="conversion", tensor=failure.parameter, file=files.get(failure.names[0], ""),
            expected="tensors that fit together", found=found,
        )  # fmt: skip
    for differs in load.wrong_dtypes:
        kind = dtype_kind(differs, load)
        if kind is not None:
            yield _finding(kind, differs.name, files, expected=differs.expected, found=differs.found)
    yield from _ties(record, load, files)
    yield from _total_size(record, load)


def _shapes(
    record: CheckRecord, load: LoadRecord, files: dict[str, str], packed: dict[str, Packed]
) -> Iterator[Finding]:
    """Wrong shapes; of a matrix put together from packed parts both the dense shape and the stored one."""
    causes = shape_causes(load)
    unpacked = {} if load.parts_checked else {one.parameter: one for one in record.packed}
    stored = {tensor.name: tensor for header in record.checkpoint.headers for tensor in header.tensors}
    for wrong in load.wrong_shapes:
        name, found = wrong.name, str(list(wrong.found))
        if name in unpacked:
            name = unpacked[name].parts[0]
            if (held := stored.get(name)) is not None:
                found = f"{found} stored as {SHORT_NAMES[held.dtype]} {list(held.shape)}"
            cause = causes.get(wrong.name)
        else:
            cause = _packed_shape_cause(packed.get(name)) or causes.get(name)
        yield _finding("shape", name, files, expected=str(list(wrong.expected)), found=found, cause=cause)


def dtype_kind(differs: WrongDtype, load: LoadRecord) -> str | None:
    """Another kind of number, another precision than the config names, or (None) nothing: the config names none."""
    if not {differs.expected, differs.found} <= _FLOATS:
        return "dtype_kind"
    return "dtype" if load.dtype_named else None


def _names(
    record: CheckRecord, load: LoadRecord, files: dict[str, str], packed: dict[str, Packed]
) -> Iterator[Finding]:
    why_missing = why_unexpected = _foreign_cause(load, packed)
    if why_missing is None:
        why_missing, why_unexpected = name_causes(load, files)
    for tensor in load.missing:
        wanted = f"{tensor.dtype} {list(tensor.shape)}"
        yield _finding("missing", tensor.name, files, expected=wanted, found="not stored", cause=why_missing)
    stored = {tensor.name: tensor for header in record.checkpoint.headers for tensor in header.tensors}
    for name in load.unexpected:
        cause = why_unexpected or _packed_cause(packed.get(name))
        held = stored.get(name)
        found = f"{held.dtype} {list(held.shape)}" if held else "stored"
        yield _finding("unexpected", name, files, expected="no such tensor", found=found, cause=cause)
    for name in load.ignored:
        held = stored.get(name)
        found = f"{held.dtype} {list(held.shape)}" if held else "stored"
        yield _finding("ignored", name, files, expected="left out by the class", found=found)


def _foreign_cause(load: LoadRecord, packed: dict[str, Packed]) -> Cause | None:
    """One cause of all names, when most of those that no parameter takes are parts of one quantised layout."""
    schemes = Counter(packed[name].scheme for name in load.unexpected if name in packed)
    if not schemes or 2 * sum(schemes.values()) < len(load.unexpected):
        return None
    what = f"a checkpoint in {schemes.most_common(1)[0][0]} parts, which transformers does not take with this config"
    return what, "use the library it was made for, or a config whose quantization_config names a method of transformers"


def _packed_cause(packed: Packed | None) -> Cause | None:
    if packed is None:
        return None
    what = f"a part of {packed.scheme} ({describe_packed(packed)}), which transformers does not take with this config"
    return what, "give config.json the quantization_config of a method that transformers has"


def _packed_shape_cause(packed: Packed | None) -> Cause | None:
    """For a part of a quantised matrix: do the stored parts at least agree with each other?"""
    if packed is None or packed.lost:
        return None
    if packed.problem is not None:
        return f"its parts do not agree: {packed.problem}", "quantise again with one setting"
    what = f"the stored parts agree with each other: {packed.scheme}, {describe_packed(packed)}"
    return what, "the config's settings or the installed quantiser want another layout; check both"


def _ties(record: CheckRecord, load: LoadRecord, files: dict[str, str]) -> Iterator[Finding]:
    sizes = {tensor.name: tensor.bytes for header in record.checkpoint.headers for tensor in header.tensors}
    verdicts = {(one.first[1], one.second[1]): one for one in record.compared}
    for tie in load.ties:
        same = verdicts.get((tie.kept, tie.tied))
        if same is not None and not same.equal:
            yield _finding("tied_differs", tie.tied, files, expected=f"the data of {tie.kept}", found="other data")
            continue
        how = "not compared" if same is None else "the same data where sampled" if same.sampled else "the same data"
        found = f"{sizes[tie.tied]:,} bytes, {how}" if tie.tied in sizes else how
        yield _finding("tied_stored", tie.tied, files, expected=f"tied to {tie.kept}", found=found)


def _total_size(record: CheckRecord, load: LoadRecord) -> Iterator[Finding]:
    """Of an index alone: does its total fit the model? (With headers, the headers are asked.)"""
    index, expected = record.checkpoint.index, load.expected_bytes
    if record.checkpoint.kind != "index" or index is None or index.total_size is None or expected is None:
        return
    if index.total_size == expected or not load.dtype_named:
        return
    factor = next((n for n in (2, 4) if index.total_size in (n * expected, expected // n)), None)
    more = index.total_size > expected
    cause = f"saved with {factor} times {'more' if more else 'fewer'} bytes per weight than the config's dtype"
    yield Finding(
        kind="total_size", file=index.file, expected=f"{expected:,} bytes for these names in this model",
        found=f"total_size {index.total_size:,} bytes", cause=cause if factor else None,
    )  # fmt: skip


def _finding(
    kind: str, tensor: str, files: dict[str, str], *, expected: str, found: str, cause: Cause | None = None
) -> Finding:
    what, remedy = cause or (None, None)
    return Finding(
        kind=kind, tensor=tensor, file=files.get(tensor, ""), expected=expected, found=found, cause=what, remedy=remedy
    )


def checkpoint_bytes(record: CheckRecord) -> int | None:
    """Bytes of the tensors: by the headers, or of an index alone what it claims."""
    checkpoint = record.checkpoint
    if checkpoint.kind == "index":
        return checkpoint.index.total_size if checkpoint.index else None
    return stored_bytes(checkpoint)
