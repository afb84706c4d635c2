"""What stock `generate()` does not tell: how many tokens each step drafted and how many it accepted.

transformers exposes no acceptance statistics; its model builds a candidate generator per call, and this hook counts in
that object's two methods. The same hook decides whether drafts are re-tokenised, which transformers judges by
vocab_size alone (transformers 5.19, `_get_candidate_generator`; see also issue 29769 there).
"""

from __future__ import annotations

from typing import Any

from ragspec.errors import ModelError
from ragspec.models.draft import width_of
from ragspec.stats import SpecStats


class AcceptanceMeter:
    """Counts the speculation of one `generate()` call at a time, at batch size 1.

    tokenizers: (target's, draft's) for a draft with another vocabulary, None for one that shares its token ids.
    draft_length: tokens that the draft model can attend to; a longer row continues without drafts. None: no limit.
    draft_width: token ids that it embeds; a row with another one continues without drafts. None: all of them.
    """

    def __init__(
        self,
        tokenizers: tuple[Any, Any] | None = None,
        draft_length: int | None = None,
        draft_width: int | None = None,
    ) -> None:
        self.stats = SpecStats()
        self.outgrown = 0  # rows that were longer than the draft model can attend to
        self.foreign = 0  # rows with a token that the draft model does not embed
        self._draft_width = draft_width
        self._drafted = 0
        self._tokenizers = tokenizers or (None, None)
        self._draft_length = draft_length

    def attach(self, model: Any) -> None:
        """Watch every candidate generator that `model` builds from now on. Raises ModelError if it builds none."""
        build = getattr(model, "_get_candidate_generator", None)
        if build is None:
            raise ModelError(
                "this version of transformers is not supported (its candidate generators have moved); "
                "use transformers 5.18 to 5.24"
            )
        target, draft = self._tokenizers
        width = width_of(model.config)

        def build_watched(**kwargs: Any) -> Any:
            generator = build(**{**kwargs, "target_tokenizer": target, "assistant_tokenizer": draft})
            _mend(generator)
            self._watch(generator, width)
            return generator

        model._get_candidate_generator = build_watched

    def start(self) -> None:
        """Start counting again."""
        self.stats = SpecStats()

    def _watch(self, generator: Any, width: int) -> None:
        get_candidates, update = generator.get_candidates, generator.update_candidate_strategy
        has_room = True
        prompt: tuple[int, int] | None = None  # tokens of the prompt, in the target's and in the draft's count

        def room_is_left(input_ids: Any) -> bool:
            """Return whether the draft model can attend to the row and a draft behind it."""
            nonlocal prompt
            if self._draft_length is None:
                return True
            if prompt is None:
                prompt = input_ids.shape[1], self._draft_tokens(input_ids)
            length = prompt[1] + self._draft_tokens(input_ids[:, prompt[0] :])
            return length + int(getattr(generator, "num_assistant_tokens", 0)) < self._draft_length

        def counting_candidates(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal has_room
            if has_room and self._draft_width is not None and int(input_ids.max()) >= self._draft_width:
                has_room = False  # the target's embeddings are padded further, and it wrote one of the padding
                self.foreign += 1
            if has_room and not room_is_left(input_ids):
                has_room = False
                self.outgrown += 1
            if not has_room:
                self._drafted = 0
                return input_ids, None
            candidates, logits = get_candidates(input_ids, *args, **kwargs)
            candidates, logits = _readable(candidates, logits, input_ids.shape[1], width)
            self._drafted = candidates.shape[1] - input_ids.shape[1]
            return candidates, logits

        def counting_update(input_ids: Any, scores: Any, num_matches: Any) -> Any:
            self.stats.record(self._drafted, int(num_matches))
            if has_room:
                update(input_ids, scores, num_matches)

        generator.get_candidates = counting_candidates
        generator.update_candidate_strategy = counting_update

    def _draft_tokens(self, input_ids: Any) -> int:
        """Return how many of the draft model's tokens a row of the target's makes."""
        target, draft = self._tokenizers
        if target is None or draft is None:
            return int(input_ids.shape[1])
        return len(draft(target.decode(input_ids[0]), verbose=False)["input_ids"])


def in_id_order(tokenizer: Any) -> Any:
    """Return `tokenizer` with its vocabulary listed by id.

    Universal speculative sampling numbers the shared tokens in the order of get_vocab() and then reads the draft's
    probabilities in the order of ids (transformers 5.19). get_vocab() has another order in every process: the
    probabilities would be those of other tokens, and one seed would give several answers.
    """
    listed = dict(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    tokenizer.get_vocab = lambda: dict(listed)
    return tokenizer


def _mend(generator: Any) -> None:
    """Work around transformers 5.19: it looks up what it pruned, even if all of the draft's tokens are shared."""
    translator = getattr(generator, "_atm_translator", None)
    if translator is not None and not hasattr(translator, "assistant_overlap_token_ids"):
        translator.assistant_prune_lm_head = False


def _readable(candidates: Any, logits: Any, length: int, width: int) -> tuple[Any, Any]:
    """Return the draft cut before the first id that the target has no row for, its logits as wide as the target's.

    candidates: (1, length + k). logits: (1, k, draft's width) or None. Embeddings of one tokenizer are padded to
    different widths; given that a token is below `width`, the narrowed logits are exactly its distribution.
    """
    beyond = (candidates[0, length:] >= width).nonzero()
    if len(beyond):
        keep = int(beyond[0])
        candidates = candidates[:, : length + keep]
        # with an empty draft the target samples on its own
        logits = None if logits is None or keep == 0 else logits[:, :keep]
    if logits is None or logits.shape[-1] == width:
        return candidates, logits
    import torch

    narrow = logits[..., :width]
    return candidates, torch.nn.functional.pad(narrow, (0, width - narrow.shape[-1]), value=float("-inf"))
