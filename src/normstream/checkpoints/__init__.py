"""Checkpoints that people already have: read, convert, rescale, fold, prune."""

from normstream.checkpoints.source import LoadedModel, load_source, require_transformers

__all__ = ["LoadedModel", "load_source", "require_transformers"]
