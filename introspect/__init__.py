"""introspect: what a PyTorch model really computes, read from a recorded run on the meta device."""

from __future__ import annotations

from introspect.table import VERSION as __version__

__all__ = ["__version__"]
