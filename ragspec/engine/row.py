"""A record while the engine answers it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ragspec.engine.sampling import Noise
from ragspec.models.generation import Processors
from ragspec.records import Request
from ragspec.speculation.citations import Copies
from ragspec.stats import SpecStats


@dataclass(slots=True)
class Row:
    """`tokens` are prompt and answer; keys and values of the first `computed` of them are in the cache row `place`.

    base: tokens of the text that generate() would have begun with: the prompt, or all there were when it began anew.
    """

    request: Request
    tokens: list[int]
    noise: Noise
    started: float
    place: int = -1
    computed: int = 0
    base: int = 0
    processors: Processors | None = None  # what its logits go through, where anything changes them
    cached: int = 0  # prompt tokens whose keys and values came from another row
    spec: SpecStats = field(default_factory=SpecStats)
    first_at: float | None = None
    reason: str = ""  # why the answer has ended; "" while it has not
    guessed: bytearray = field(default_factory=bytearray)  # per token of the answer: 1 where a draft had it
    copies: Copies = field(init=False)

    def __post_init__(self) -> None:
        self.base = len(self.request.token_ids)
        self.copies = Copies(self.request.token_ids, self.request.passages)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.token_ids)

    @property
    def written(self) -> int:
        """Length of the answer so far."""
        return len(self.tokens) - len(self.request.token_ids)

    @property
    def room(self) -> int:
        """Tokens that the answer may still have."""
        return self.request.sampling.max_new_tokens - self.written

    @property
    def samples(self) -> bool:
        """Whether its tokens are drawn."""
        return self.request.sampling.temperature > 0

    @property
    def ready(self) -> bool:
        """Whether all but the last token are computed: the next forward writes."""
        return self.computed == len(self.tokens) - 1
