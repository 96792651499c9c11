"""JSON read with nothing let through: one object, no key twice, a bounded size.

`json.load` keeps the last of two equal keys and says nothing; a config edited by hand then means something else than it
reads. Non-finite numbers are accepted: real configs hold `Infinity` (the time-step limits of Mamba).
"""

from __future__ import annotations

import json
from typing import Any

MAX_BYTES = 16 * 2**20
"""No config comes near this; a checkpoint or tokenizer given by mistake does."""


class JsonProblem(ValueError):
    """What is wrong with a document, in words; whoever reads the file knows its name and says it."""


def parse_object(data: bytes, *, limit: int = MAX_BYTES) -> dict[str, Any]:
    """The one JSON object that `data` (UTF-8, a byte-order mark allowed) holds. Raises JsonProblem."""
    if len(data) > limit:
        raise JsonProblem(f"more than the {limit} bytes that are read of such a file")
    if not data.strip():
        raise JsonProblem("the file is empty")
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise JsonProblem(f"not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise JsonProblem(f"not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise JsonProblem("not JSON that can be read: nested too deeply") from None
    except JsonProblem:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise JsonProblem(f"not JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise JsonProblem(f"the JSON is {_kind(value)}, not an object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise JsonProblem(f"key {key!r} appears twice")
        result[key] = value
    return result


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
