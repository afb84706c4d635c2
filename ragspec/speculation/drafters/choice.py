"""The drafters that need no model, by their `method:` words, and what they have learnt."""

from __future__ import annotations

from typing import Any

from ragspec.speculation.drafters.base import Drafter
from ragspec.speculation.drafters.context import ContextDrafter
from ragspec.speculation.drafters.prompt_lookup import PromptLookup


def model_free(ngrams: tuple[int | None, int | None], isolate: bool) -> dict[str, Drafter]:
    """Return a new drafter of each kind. ngrams: shortest and longest that prompt lookup looks up, None for its own."""
    smallest = ngrams[0] or 1
    return {
        "prompt_lookup": PromptLookup(smallest, ngrams[1] or max(3, smallest)),
        "context": ContextDrafter(isolate),
    }


def judged(drafter: Drafter | None) -> dict[str, Any]:
    """Return how well a drafter judges its guesses, for the statistics; empty where it has made none."""
    calibration = getattr(drafter, "calibration", None)
    if calibration is None or calibration.error is None:
        return {}
    return {"calibration_error": round(calibration.error, 4), "guesses_scored": calibration.trials}
