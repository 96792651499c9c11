"""introspect: what a PyTorch model really computes, read from a recorded run on the meta device.

Importing it imports no torch; `trace` and `analyze` do when a model has to run.
"""

from __future__ import annotations

from introspect.api import analyze, load_trace, save_trace, trace
from introspect.errors import IntrospectError
from introspect.records import Trace
from introspect.table import VERSION as __version__
from introspect.table import Result, Table

__all__ = ["IntrospectError", "Result", "Table", "Trace", "__version__", "analyze", "load_trace", "save_trace", "trace"]
