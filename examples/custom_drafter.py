"""Your own drafter: it remembers which token followed each pair of tokens.

    python examples/custom_drafter.py

To use it with `ragspec generate`, put it in a package; `speculation.method: pairs` then works with both runners:

    [project.entry-points."ragspec.drafters"]
    pairs = "custom_drafter:Pairs"
"""

import argparse
from collections.abc import Sequence
from importlib.metadata import entry_points

import ragspec

PASSAGE = "Ann Smith built the brick mill at Aldby in 1871."
RECORDS = [{"query": "Repeat the passage word for word.", "contexts": [PASSAGE]}] * 2  # the second reuses the first


class Pairs:
    """A `ragspec.Drafter`. What it learns from one record serves the next."""

    def __init__(self, settings: object = None) -> None:
        self.next: dict[tuple[int, int], int] = {}

    def open(self, prompt: Sequence[int], passages: Sequence[tuple[int, int]] = ()) -> "PairsRow":
        return PairsRow(self.next, prompt)


class PairsRow:
    """A `ragspec.RowDrafter`."""

    def __init__(self, following: dict[tuple[int, int], int], prompt: Sequence[int]) -> None:
        self.next, self.last = following, (-1, -1)
        self.extend(prompt)

    def propose(self, limit: int) -> ragspec.Draft:
        guesses: list[int] = []
        last = self.last  # follow the chain of known pairs
        while len(guesses) < min(limit, 8) and (token := self.next.get(last)) is not None:
            guesses.append(token)
            last = (last[1], token)
        return ragspec.Draft(guesses)

    def extend(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self.next[self.last] = token
            self.last = (self.last[1], token)

    def close(self) -> None:
        pass


def main(argv: list[str] | None = None) -> None:
    """Answer the records with the drafter."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=32, help="longest answer, in tokens")
    args = parser.parse_args(argv)

    if not entry_points(group="ragspec.drafters", name="pairs"):  # not installed: register it in this process only
        ragspec.register_drafter("pairs", Pairs)
    raw = {
        "model": args.model,
        "sampling": {"max_new_tokens": args.tokens},
        "speculation": {"method": "pairs", "num_tokens": 4},
        "runner_args": {"batch_size": 1},  # one record at a time
    }
    with ragspec.Pipeline(ragspec.load_config(raw)) as pipeline:
        for answer in pipeline.answers(RECORDS):
            print(answer["output"])
        print(f"{pipeline.summary.spec.accepted} of {pipeline.summary.spec.drafted} drafted tokens accepted")


if __name__ == "__main__":
    main()
