"""Omnistage: serve any-to-any models as a graph of stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnistage.graph import Graph
    from omnistage.serving.omni import Answer, Omni

__all__ = ["Answer", "Graph", "Omni"]

_HOMES = {"Graph": "omnistage.graph", "Omni": "omnistage.serving.omni", "Answer": "omnistage.serving.omni"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import omnistage` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'omnistage' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
