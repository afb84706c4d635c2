"""The form of a run's output lines: its `output.format`."""

from __future__ import annotations

from ragspec.config.run import RunConfig
from ragspec.outputs.answers import Native, Shape
from ragspec.outputs.openai_batch import OpenAIBatch


def shape_of(config: RunConfig) -> Shape:
    """Return what writes a run's lines."""
    if config.output.format == "openai":
        return OpenAIBatch(config.output.model or str(config.model))
    return Native()
