"""The few shapes that steps over the paged cache have, and how the segments of a step are cut into their rows.

A step has R rows of n tokens. A prompt is cut into rows of up to 64 tokens, and a long draft into several rows too:
rows of one text see each other's keys, since a layer writes before it attends. Shapes are padded up to few sizes, so
that a captured step serves many. Tokens of prompts are packed: only attention sees rows and their padding. Beside
prompts a step may have D rows that decode or verify, so that the model's weights are read once for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from ragspec.engine.backends.paged_attention import TILE
from ragspec.engine.model.layout import Segment

# Few sizes, since FlexAttention is compiled and a graph captured for each; weights cost more than padding.
TOKENS = (1, 4)  # of a row that decodes or verifies, padding included
ROWS = (1, 4, 16, 64, 96, 128, 192, 256, 384, 512)  # of a step that decodes or verifies, padding included
MOST = 2048  # tokens of a step
PROMPTS = (64, 256, 512, 1024, MOST)  # tokens of a step that computes prompts, padding included
SPARE = 20  # rows of such a step beyond those of full tiles: last tiles of prompts
EXACT = 4, 64  # tokens of a row, and rows, of a step that decodes, where all steps have one shape
WIDTH = 32  # least width of block tables; larger ones are powers of two
RIDGE = 256  # tokens from which multiplying by a layer's weights takes longer than reading them, on GPUs of today


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a step: rows, tokens of each, width of block tables; whether all tokens' logits are wanted, or at
    most one per row; number of tokens if they are packed, otherwise 0; number of rows beside those, and tokens of each;
    whether rows read together what they share."""

    rows: int
    tokens: int
    width: int
    all_logits: bool
    packed: int = 0
    beside: int = 0
    beside_tokens: int = 1
    cascade: bool = False

    @property
    def size(self) -> int:
        """Number of tokens."""
        return (self.packed or self.rows * self.tokens) + self.beside * self.beside_tokens

    @property
    def logits(self) -> int:
        """Number of tokens with logits."""
        return self.size if self.all_logits else self.rows + self.beside * self.beside_tokens


@dataclass(slots=True)
class StepRow:
    """A row of a step: `count` tokens of a cache row from position `start`. packed: index of the first among the
    forward's tokens. beside: whether it decodes or verifies beside prompts."""

    row: int
    start: int
    count: int
    packed: int
    beside: bool = False


def step_rows(segments: Iterable[tuple[int, Segment]], tokens: int, beside: bool = False) -> list[StepRow]:
    """Return the rows of segments, each with the packed index of its first token, cut into up to `tokens` tokens."""
    return [
        StepRow(segment.row, segment.start + first, min(tokens, segment.count - first), packed + first, beside)
        for packed, segment in segments
        for first in range(0, segment.count, tokens)
    ]


def tokens_per_row(counts: Sequence[int], blocks: float) -> int:
    """Return into rows of how many tokens to cut the segments of a step, of `counts` tokens, so that it takes least.

    More rows read a text's keys and values more often; longer rows have more padding.

    Args:
        counts: Tokens of each segment.
        blocks: Bytes of keys and values that a row reads, as a share of the weights'.
    """
    if max(counts) == 1:
        return 1
    best, least = TOKENS[-1], float("inf")
    for tokens in reversed(TOKENS):
        rows = sum(-(-count // tokens) for count in counts)
        steps, rest = divmod(rows, most_rows(tokens))
        sizes = [most_rows(tokens)] * steps + [padded(rest, ROWS)] * (rest > 0)
        taken = sum(_cost(size * tokens) for size in sizes) + rows * blocks
        if taken < least:
            best, least = tokens, taken
    return best


def _cost(tokens: int) -> float:
    """Return how long a step of so many tokens takes, padding included, in times that reading the weights takes.

    A roofline without its edge: reading and multiplying overlap, but not wholly (docs/lab/log.md, 2026-11-28).
    """
    return float((1 + (tokens / RIDGE) ** 1.5) ** (2 / 3))


def most_rows(tokens: int) -> int:
    """Return the most rows of a step with rows of so many tokens."""
    return max(rows for rows in ROWS if rows * tokens <= MOST)


def padded(number: int, sizes: Sequence[int]) -> int:
    """Return the least of `sizes` that holds `number`."""
    return next(size for size in sizes if size >= number)


def tables_width(blocks: int) -> int:
    """Return the width of block tables for rows of up to `blocks` blocks."""
    return max(WIDTH, 1 << (blocks - 1).bit_length())


def packed(segments: Iterable[Segment]) -> list[tuple[int, Segment]]:
    """Return segments, each with the index of its first token among those of all."""
    several = list(segments)
    return list(zip(accumulate((segment.count for segment in several), initial=0), several, strict=False))


class StepShapes:
    """Into which shapes steps are cut.

    Args:
        exact: Whether steps have the same shape whatever they compute, so that the bits of a token's logits depend on
            the tokens before it alone.
    """

    def __init__(self, exact: bool) -> None:
        self.exact = exact

    def likely(self, rows: int, drafts: bool) -> list[StepShape]:
        """Return what a run of `rows` rows is likely to need. drafts: whether rows verify drafts."""
        width = tables_width(1)
        shapes = [StepShape(size, TILE, width, False, length) for length, size in self._prompt_sizes]
        if self.exact:
            tokens, size = EXACT
            return [*shapes, StepShape(size, tokens, width, True)]
        prompts = list(shapes)
        for tokens in TOKENS if drafts else TOKENS[:1]:
            if self.joins(rows, rows, MOST, tokens):
                shapes += [replace(shape, beside=padded(rows, ROWS), beside_tokens=tokens) for shape in prompts]
            wanted = min(rows * (tokens if tokens > 1 else 1 + drafts), ROWS[-1])
            most = min(padded(wanted, ROWS), most_rows(tokens))
            shapes += [StepShape(size, tokens, width, True) for size in ROWS if size <= most]
        return shapes

    def cut(
        self, segments: Sequence[Segment], width: int, token_share: float, most: int, *, captured: bool = True
    ) -> Iterator[tuple[list[StepRow], StepShape]]:
        """Yield the rows of each step for some segments, and its shape, but for the logits that are wanted.

        Args:
            segments: What is to be computed.
            width: Of block tables.
            token_share: Bytes of a token's keys and values, as a share of the weights'.
            most: Rows of the run.
            captured: Whether steps are captured. Launching others takes longer than what they compute, so prompts are
                then padded rather than cut into more steps.
        """
        decoding: list[tuple[int, Segment]] = []
        prompts: list[tuple[int, Segment]] = []
        for each in packed(segments):
            short = not each[1].alone and (self.exact or each[1].count <= TILE)
            (decoding if short else prompts).append(each)
        beside, more = self._beside(decoding, sum(segment.count for _, segment in prompts), most)
        if decoding and not beside:
            tokens, size = EXACT
            if not self.exact:
                reach = sum(segment.start + segment.count for _, segment in decoding) / len(decoding)
                tokens = tokens_per_row([segment.count for _, segment in decoding], reach * token_share)
                size = most_rows(tokens)
            rows = step_rows(decoding, tokens)
            for at in range(0, len(rows), size):
                part = rows[at : at + size]
                yield part, StepShape(size if self.exact else padded(len(part), ROWS), tokens, width, self.exact)
        rows, size = step_rows(prompts, TILE), self._prompt_sizes[-1][1] - 1
        while rows:
            places, tokens = padded(most, ROWS) if beside else 0, MOST
            if captured and not self.exact:
                tokens = least_cost(min(MOST, sum(row.count for row in rows)), places * more)[2]
            part, rows = _first(rows, tokens, size, whole=self.exact)
            length = sum(row.count for row in part)
            tiles = next(each for each in self._prompt_sizes if length <= each[0] and len(part) < each[1])
            yield [*part, *beside], StepShape(tiles[1], TILE, width, False, tiles[0], places, more)
            beside, more = [], 1

    def _beside(self, decoding: Sequence[tuple[int, Segment]], tokens: int, most: int) -> tuple[list[StepRow], int]:
        """Return the rows of segments that are computed beside so many tokens of prompts, and the tokens of each."""
        if not tokens:
            return [], 1
        each = TOKENS[any(segment.count > 1 for _, segment in decoding)]
        rows = sum(-(-segment.count // each) for _, segment in decoding)
        return (step_rows(decoding, each, beside=True), each) if self.joins(rows, most, tokens, each) else ([], 1)

    def joins(self, rows: int, most: int, tokens: int, each: int) -> bool:
        """Return whether rows are computed sooner in a step of prompts, which reads weights too.

        Args:
            rows: How many there are.
            most: Rows of the run, which the step has places for.
            tokens: Of prompts.
            each: Tokens of each row, padding included.
        """
        if self.exact or not rows or not tokens or most > most_rows(each) or rows > padded(most, ROWS):
            return False
        beside = padded(most, ROWS) * each
        return least_cost(tokens, beside)[0] < _cost(padded(rows, ROWS) * each) + least_cost(tokens)[0]

    def places(self, most: int) -> int:
        """Return how many tokens of drafts there are beside prompts, padding included. most: rows of the run."""
        return padded(most, ROWS) * (TOKENS[-1] - TOKENS[0])

    def fitted(self, counts: Sequence[int], most: int) -> list[int]:
        """Return how many of the tokens of each segment, `counts`, fit beside prompts. most: rows of the run.

        The first few of all do; as long as there are places left, some have more.
        """
        each, left = TOKENS[-1], padded(most, ROWS) - len(counts)
        kept = [min(each, count) for count in counts]
        for rows in range(1, -(-max(counts, default=0) // each)):
            for at, count in enumerate(counts):
                if left > 0 and count > rows * each:
                    kept[at] = min(count, (rows + 1) * each)
                    left -= 1
        return kept

    def one_step(self, rows: int) -> bool:
        """Return whether so many rows that decode make one step."""
        return rows <= (EXACT[1] if self.exact else most_rows(1))

    @property
    def _prompt_sizes(self) -> list[tuple[int, int]]:
        """Tokens and rows of steps that compute prompts."""
        return [(size, size // TILE + SPARE) for size in (PROMPTS[-1:] if self.exact else PROMPTS)]


@cache
def least_cost(tokens: int, beside: int = 0) -> tuple[float, int, int]:
    """Return how to compute so many tokens of prompts soonest: its cost, number of steps, and the first one's size.

    Padding may cost more than another step. beside: rows of one token in the first step.
    """
    if tokens > MOST:
        steps, rest = divmod(tokens - MOST, MOST)
        cost, more = least_cost(rest)[:2] if rest else (0.0, 0)
        return _cost(MOST + beside) + steps * _cost(MOST) + cost, 1 + steps + more, MOST
    found = []
    for size in reversed(PROMPTS):
        cost, steps = (0.0, 0) if size >= tokens else least_cost(tokens - size)[:2]
        found.append((_cost(size + beside) + cost, 1 + steps, size))
    return min(found, key=lambda way: way[:2])


def _first(rows: Sequence[StepRow], tokens: int, most: int, *, whole: bool) -> tuple[list[StepRow], list[StepRow]]:
    """Return the first of some rows, up to `most` of up to `tokens` tokens together, and the others.

    whole: no row is cut in two.
    """
    ends = list(accumulate(row.count for row in rows[:most]))
    count = sum(end <= tokens for end in ends)
    room = tokens - (ends[count - 1] if count else 0)
    if whole or not room or count == len(ends):
        return list(rows[:count]), list(rows[count:])
    cut = rows[count]
    rest = StepRow(cut.row, cut.start + room, cut.count - room, cut.packed + room)
    return [*rows[:count], replace(cut, count=room)], [rest, *rows[count + 1 :]]
