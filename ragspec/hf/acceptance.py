"""What stock `generate()` does not tell: how many tokens each step drafted and how many it accepted.

transformers exposes no acceptance statistics; its model builds a candidate generator per call, and this hook counts in
that object's two methods. The same hook decides whether drafts are re-tokenised, which transformers judges by
vocab_size alone (transformers 5.19, `_get_candidate_generator`; see also issue 29769 there).
"""

from __future__ import annotations

from typing import Any

from ragspec.errors import ModelError
from ragspec.stats import SpecStats


class AcceptanceMeter:
    """Counts the speculation of one `generate()` call at a time, at batch size 1.

    tokenizers: (target's, draft's) for a draft of another vocabulary, None for one that shares its token ids.
    """

    def __init__(self, tokenizers: tuple[Any, Any] | None = None) -> None:
        self.stats = SpecStats()
        self._drafted = 0
        self._tokenizers = tokenizers or (None, None)

    def attach(self, model: Any) -> None:
        """Watch every candidate generator that `model` builds from now on. Raises ModelError where it builds none."""
        build = getattr(model, "_get_candidate_generator", None)
        if build is None:
            raise ModelError(
                "this transformers version builds its candidate generators elsewhere; use transformers 5.16 to 5.19"
            )
        target, draft = self._tokenizers
        width = model.config.get_text_config().vocab_size

        def build_watched(**kwargs: Any) -> Any:
            generator = build(**{**kwargs, "target_tokenizer": target, "assistant_tokenizer": draft})
            self._watch(generator, width)
            return generator

        model._get_candidate_generator = build_watched

    def start(self) -> None:
        """Begin counting anew."""
        self.stats = SpecStats()

    def _watch(self, generator: Any, width: int) -> None:
        get_candidates, update = generator.get_candidates, generator.update_candidate_strategy

        def counting_candidates(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            candidates, logits = get_candidates(input_ids, *args, **kwargs)
            self._drafted = candidates.shape[1] - input_ids.shape[1]
            return candidates, _as_wide_as(logits, width)

        def counting_update(input_ids: Any, scores: Any, num_matches: Any) -> Any:
            self.stats.record(self._drafted, int(num_matches))
            return update(input_ids, scores, num_matches)

        generator.get_candidates = counting_candidates
        generator.update_candidate_strategy = counting_update


def _as_wide_as(logits: Any, width: int) -> Any:
    """Return draft logits (1, k, draft's width) at the target's width: padding rows differ, the tokens do not."""
    if logits is None or logits.shape[-1] == width:
        return logits
    import torch

    narrow = logits[..., :width]
    return torch.nn.functional.pad(narrow, (0, width - narrow.shape[-1]), value=float("-inf"))
