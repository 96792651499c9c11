"""Likely causes of what does not fit: told from shapes and names alone, and only where they leave little doubt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from introspect.analyzers._findings import split_name
from introspect.check_record import LoadRecord, WrongShape

Cause = tuple[str, str]  # what happened, what to do

_SAME_CONFIG = "use the config this checkpoint was made with"


def shape_causes(load: LoadRecord) -> dict[str, Cause]:
    """Tensor -> cause, for the tensors of another shape that have a better one than "made for another config"."""
    degrees = _degrees(load.wrong_shapes)
    found = {wrong.name: _shape_cause(wrong, load, degrees) for wrong in load.wrong_shapes}
    return {name: cause for name, cause in found.items() if cause is not None}


def _shape_cause(wrong: WrongShape, load: LoadRecord, degrees: Counter[int]) -> Cause | None:
    expected, found = wrong.expected, wrong.found
    if len(expected) == 2 and found == expected[::-1]:
        return "stored transposed ([in, out], as TensorFlow, JAX and Conv1D have it)", "transpose it and save again"
    if wrong.vocabulary and found[1:] == expected[1:]:
        return _vocabulary_cause(expected[0], found[0])
    changed = [axis for axis in range(len(expected)) if len(found) == len(expected) and found[axis] != expected[axis]]
    if len(changed) != 1:
        return None
    axis = changed[0]
    degree = _degree(wrong)
    if degree and degrees[degree] > 1:
        what = f"a tensor-parallel shard: one of {degree}, cut along dimension {axis}"
        return what, "merge the shards of all ranks first"
    return _head_cause(expected[axis], found[axis], load.dimensions) if "att" in wrong.name else None


def _vocabulary_cause(expected: int, found: int) -> Cause:
    multiple = next((step for step in (512, 256, 128, 64, 32, 16, 8) if found % step == 0), 0)
    if found > expected and multiple and found - expected < multiple:
        what = f"vocabulary padded from {expected:,} to {found:,} rows, a multiple of {multiple}"
        return what, f"set vocab_size to {found} in config.json, or cut the rows off"
    what = f"a vocabulary of {found:,} tokens where the config says {expected:,}"
    return what, f"set vocab_size to {found} in config.json if the tokenizer has them, else resize the embeddings"


def _head_cause(expected: int, found: int, dimensions: dict[str, int]) -> Cause | None:
    width = dimensions.get("head_dim") or 0
    heads, kv_heads = dimensions.get("num_attention_heads", 0), dimensions.get("num_key_value_heads", 0)
    if width <= 1 or expected % width or found % width or expected // width not in (heads, kv_heads):
        return None
    wanted, stored = expected // width, found // width
    if wanted == kv_heads != heads == stored:
        what = f"keys or values stored for all {heads} query heads; the config groups them into {kv_heads}"
        return what, f"set num_key_value_heads to {heads}, or average each group of heads"
    return f"{stored} heads of {width} where the config says {wanted}", _SAME_CONFIG


def _degrees(wrong_shapes: Iterable[WrongShape]) -> Counter[int]:
    """For each degree N, in how many roles a dimension is exactly 1/N of what it should be."""
    roles = {(split_name(wrong.name)[0], _degree(wrong)) for wrong in wrong_shapes}
    return Counter(degree for _, degree in roles if degree)


def _degree(wrong: WrongShape) -> int:
    """N when exactly one dimension is 1/N of the expected one, else 0."""
    if len(wrong.expected) != len(wrong.found):
        return 0
    changed = [(e, f) for e, f in zip(wrong.expected, wrong.found, strict=True) if e != f]
    if len(changed) != 1:
        return 0
    expected, found = changed[0]
    return expected // found if found and expected > found and expected % found == 0 else 0


def name_causes(load: LoadRecord, stored: Iterable[str]) -> tuple[Cause | None, Cause | None]:
    """Causes of (all missing, all unexpected) names together, where one explains them."""
    missing = [tensor.name for tensor in load.missing]
    unexpected = list(load.unexpected)
    if missing and unexpected and (prefix := _shared_prefix(missing, unexpected)) is not None:
        both = f"every name {prefix}", "rename the tensors, or save the model without that wrapper"
        return both, both
    if any(".base_layer." in name for name in unexpected):
        both = (
            "saved from a model wrapped by PEFT, adapter and base together",
            "merge the adapter first (merge_and_unload)",
        )
        return both, both
    depth = _depth_cause(missing, unexpected, load, stored)
    if depth is not None:
        return depth, depth
    if missing and all(tensor.head for tensor in load.missing):
        head = ", ".join(sorted({name.partition(".")[0] for name in missing}))
        cause = f"no head ({head}): a checkpoint of the base model or of another task"
        remedy = "check it against the class it was saved from, or train the head: it would stay at random values"
        return (cause, remedy), None
    return None, None


def _shared_prefix(missing: list[str], unexpected: list[str]) -> str | None:
    """How the stored names differ from the wanted ones, when that is one prefix for nearly all of them."""
    wanted, given = set(missing), set(unexpected)
    if prefix := _prefix_between(missing, given):
        return f"carries the prefix {prefix!r} that the model does not have"
    if prefix := _prefix_between(unexpected, wanted):
        return f"lacks the prefix {prefix!r} that the model has"
    return None


def _prefix_between(short: list[str], long: set[str]) -> str | None:
    """P where P + name is in `long` for nine tenths of the names in `short`."""
    sample = min(short, key=lambda name: (len(name), name))
    prefixes = {name[: -len(sample)] for name in long if name.endswith(f".{sample}")}
    for prefix in sorted(prefixes, key=len)[:20]:
        if sum(prefix + name in long for name in short) >= 0.9 * len(short):
            return prefix
    return None


def _depth_cause(missing: list[str], unexpected: list[str], load: LoadRecord, stored: Iterable[str]) -> Cause | None:
    """Another number of layers: all that is missing, or too much, belongs to layers behind a certain one."""
    if bool(missing) == bool(unexpected):
        return None
    layers = load.dimensions.get("num_hidden_layers", 0)
    kept = set(unexpected)
    have = {numbers[0] + 1 for name in stored if name not in kept for numbers in [split_name(name)[1]] if numbers}
    depth = max(have, default=0)
    if missing and depth < layers:
        firsts = [numbers[0] if (numbers := split_name(name)[1]) else -1 for name in missing]
        if set(firsts) == set(range(depth, layers)):
            return f"the checkpoint has {depth} layers, the config {layers}", _SAME_CONFIG
    if unexpected and layers:
        firsts = [numbers[0] if (numbers := split_name(name)[1]) else -1 for name in unexpected]
        if min(firsts) == layers:
            return f"the checkpoint has {max(firsts) + 1} layers, the config {layers}", _SAME_CONFIG
    return None
