"""What a checkpoint's files say about themselves and each other, without any model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

from introspect.analyzers._findings import Finding, ranges, split_name
from introspect.check_record import CheckRecord, SameBytes
from introspect.checkpoint import INDEX_SUFFIX, SHARD_NAME, Checkpoint
from introspect.packed import Packed
from introspect.safetensors_header import SHORT_NAMES, Header, StoredTensor

FLOATS = ("F64", "F32", "F16", "BF16")


def file_findings(record: CheckRecord) -> Iterator[Finding]:
    """Everything that can be said without a model."""
    checkpoint = record.checkpoint
    for unread in checkpoint.unread:
        yield Finding(kind=unread.kind, file=unread.file, expected=unread.expected, found=unread.found)
    for header in checkpoint.headers:
        yield from _header_findings(header)
    yield from _twice(record)
    yield from _index_findings(checkpoint)
    yield from _shard_numbers(checkpoint)
    for stray in checkpoint.strays:
        yield Finding(kind="stray_file", file=stray, found="not part of this checkpoint")
    known = set() if record.load is None else record.load.named
    for packed in record.packed:
        yield from _packed_findings(packed, known, explain=record.load is None)
    if record.load is None or not record.load.dtype_named:
        yield from _mixed_dtypes(checkpoint)


def _header_findings(header: Header) -> Iterator[Finding]:
    for fault in header.faults:
        yield Finding(
            kind=fault.kind, tensor=fault.tensor, file=header.file, expected=fault.expected, found=fault.found
        )
    form = (header.metadata or {}).get("format")
    if form is not None and form != "pt":
        yield Finding(kind="metadata", file=header.file, expected="format pt", found=f"format {form}")


def _twice(record: CheckRecord) -> Iterator[Finding]:
    """Names that more than one file holds. A file that repeats another whole is one finding."""
    kept: dict[str, tuple[str, StoredTensor]] = {}
    verdicts = {(one.first[0], one.second[0], one.second[1]): one for one in record.compared}
    for header in record.checkpoint.headers:
        again: list[tuple[str, Finding]] = []
        for tensor in header.tensors:
            file, first = kept.setdefault(tensor.name, (header.file, tensor))
            if file == header.file:
                continue
            differs, how = _difference(first, tensor, verdicts.get((file, header.file, tensor.name)))
            kind = "duplicate_differs" if differs else "duplicate"
            expected, found = f"each tensor in one shard; {file} has it", f"here again, {how}"
            finding = Finding(kind=kind, tensor=tensor.name, file=header.file, expected=expected, found=found)
            again.append((file, finding))
        if len(again) == len(header.tensors) > 1 and len({(file, one.kind, one.found) for file, one in again}) == 1:
            whole = again[0][1]
            yield replace(whole, tensor="*", count=len(again), found=f"all of them {whole.found}")
        else:
            yield from (finding for _, finding in again)


def _difference(first: StoredTensor, second: StoredTensor, same: SameBytes | None) -> tuple[bool, str]:
    if same is None:
        return (first.dtype, first.shape) != (second.dtype, second.shape), "their data was not compared"
    if not same.equal:
        return True, "other data"
    return False, "the same data where sampled" if same.sampled else "the same data"


def _index_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    index = checkpoint.index
    if index is None:
        yield from _without_index(checkpoint)
        return
    for fault in index.faults:
        yield Finding(kind=fault.kind, tensor=fault.tensor, file=index.file, expected=fault.expected, found=fault.found)
    if checkpoint.kind == "index":
        return
    held = {header.file: {tensor.name for tensor in header.tensors} for header in checkpoint.headers}
    holders = {name: file for file, names in held.items() for name in names}
    silent = {unread.file for unread in checkpoint.unread}
    for name, file in index.weight_map.items():
        if file in silent or name in held.get(file, ()):
            continue
        if name in holders:
            found = f"in {holders[name]}"
            yield Finding(kind="wrong_shard", tensor=name, file=index.file, expected=f"in {file}", found=found)
        else:
            yield Finding(kind="not_in_shard", tensor=name, file=file, expected=f"in {file}", found="in no shard")
    for name in holders.keys() - index.weight_map.keys():
        file = holders[name]
        yield Finding(kind="unindexed", tensor=name, file=file, expected="an entry in the index", found="no entry")
    if index.total_size is not None and not checkpoint.unread:
        total = stored_bytes(checkpoint)
        if total != index.total_size:
            found = f"total_size {index.total_size:,} bytes"
            yield Finding(kind="total_size", file=index.file, expected=f"{total:,} bytes of tensors", found=found)


def _without_index(checkpoint: Checkpoint) -> Iterator[Finding]:
    if checkpoint.kind in ("folder", "hub") and len(checkpoint.headers) + len(checkpoint.unread) > 1:
        found = f"{len(checkpoint.headers) + len(checkpoint.unread)} files and no index"
        yield Finding(kind="no_index", expected=f"model{INDEX_SUFFIX}", found=found)


def _shard_numbers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Shards that the others' names count and that are not there."""
    names = [header.file for header in checkpoint.headers] + [unread.file for unread in checkpoint.unread]
    if checkpoint.index is not None:
        names += checkpoint.index.files
    if checkpoint.kind == "file":
        return  # one file was asked about
    series: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for name in names:
        if match := SHARD_NAME.fullmatch(name):
            series[match["stem"], int(match["count"])].add(int(match["number"]))
    for (stem, count), numbers in series.items():
        lacking = set(range(1, min(count, 100_000) + 1)) - numbers
        if lacking and 0 not in numbers:
            found = f"without {ranges(lacking)}"
            yield Finding(kind="missing_shard", file=stem, expected=f"{count} shards named {stem}", found=found)


def _packed_findings(packed: Packed, known: set[str], *, explain: bool) -> Iterator[Finding]:
    """Parts that lack or disagree, unless the loader has named them already; what the parts stand for (`explain`)."""
    main = packed.parts[0]
    stands = f"{packed.scheme}: {describe_packed(packed)}"
    for part in set(packed.lost) - known:
        expected = f"a part of {packed.scheme}"
        yield Finding(kind="packed_incomplete", tensor=part, expected=expected, found="not stored")
    if packed.problem and known.isdisjoint(packed.parts):
        yield Finding(kind="packed_shape", tensor=main, expected=packed.scheme, found=packed.problem)
    elif explain and not packed.lost:
        parts = " + ".join(part.removeprefix(_stem(packed)) for part in packed.parts)
        yield Finding(kind="packed", tensor=main, expected=stands, found=parts)


def describe_packed(packed: Packed) -> str:
    """The matrix that quantised parts stand for, in words."""
    if packed.shape is not None:
        what = f"a matrix {list(packed.shape)}"
    elif packed.elements is not None:
        what = f"{packed.elements:,} elements"
    elif packed.grouping:
        what = "a matrix whose bits per weight only the config tells"
    else:
        what = "a matrix"
    details = ", ".join(filter(None, [f"{packed.bits}-bit" if packed.bits else "", packed.grouping]))
    return f"{what} ({details})" if details else what


def _stem(packed: Packed) -> str:
    name = packed.parameter
    return name.removesuffix("weight") if name.endswith("weight") else name


def _mixed_dtypes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """One role in more than one float dtype. Quantised layers beside unquantised ones are usual and left alone."""
    roles: defaultdict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for header in checkpoint.headers:
        for tensor in header.tensors:
            roles[split_name(tensor.name)[0]].append((tensor.name, tensor.dtype, header.file))
    for members in roles.values():
        dtypes = Counter(dtype for _, dtype, _ in members if dtype in FLOATS)
        if len(dtypes) < 2:
            continue
        usual = dtypes.most_common(1)[0][0]
        for name, dtype, file in members:
            if dtype in FLOATS and dtype != usual:
                expected = f"{SHORT_NAMES[usual]} as in most layers"
                yield Finding(kind="mixed_dtype", tensor=name, file=file, expected=expected, found=SHORT_NAMES[dtype])


def stored_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all tensors, each name once."""
    sizes = {tensor.name: tensor.bytes for header in checkpoint.headers for tensor in header.tensors}
    return sum(sizes.values())


def file_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Which file holds a tensor, or should by the index."""
    index = checkpoint.index.weight_map if checkpoint.index is not None else {}
    return dict(index) | {tensor.name: header.file for header in checkpoint.headers for tensor in header.tensors}
