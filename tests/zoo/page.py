"""docs/reference/models.md: who answers for which model, as the zoo found it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.zoo.entry import Entry, Outcome
from tests.zoo.others import ABSENT
from tests.zoo.table import CLASSES, FAMILIES

PATH = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"

PAGE = """\
# Which models run on the engine

ragspec runs every causal language model that transformers can load. One of two backends answers:

- **ragspec's batched engine** runs the model's own code over packed rows: batches, every draft, shared prefixes.
- **Stock transformers `generate()`** answers for a model whose code does not fit the engine: in padded batches with
  `method: none`, one record at a time with drafts (`prompt_lookup`, `draft_model`, `early_exit`).
  Most models that keep a recurrent state take no drafts at all: only `method: none`.

There is no list of models in ragspec. Every model is checked after loading: the logits that the engine computes for two
rows, a prompt in chunks and a rejected draft must match those of the model's own forward pass. If they do not,
`generate()` answers, and the run says so on the terminal and under `notes` in the stats file:

    stock generate() answers, not ragspec's engine: "my-model": it computes different logits in packed rows (by ...)

`runner_args: {{engine: ragspec}}` makes that an error, and so does `method: context`, which `generate()` does not have.
`runner_args: {{engine: transformers}}` asks for `generate()` from the start.

This page shows test results with transformers {version}. For each class, a tiny model with random weights and the
features of its family (small windows, several experts, soft-capped scores) answers prompts of 9 to 90 tokens in
batches, with right and wrong drafts. Its answers must be those that `generate()` gives to each prompt alone, token for
token. A real model is checked again when it is loaded: the table says what to expect, the run what happened.

Of the {classes} classes of causal models in transformers, {engine} run on the engine and {stock} on stock `generate()`;
{absent} cannot be tried here. None gives a wrong answer.

The last two columns say what else can compute attention on the engine: torch's `sdpa`, and `flex`, FlexAttention over a
cache in blocks as on GPUs ({flex} classes), whose steps are run on the buffers that a GPU would capture.

| Model type | Class | Answered by | Why | sdpa | flex |
|---|---|---|---|---|---|
{rows}

Further options of these families, one config each (`far`: the limit lies within the prompts, after some 50 tokens):

| Config | Answered by | Why | sdpa | flex |
|---|---|---|---|---|
{variants}

`python -m tests.zoo` writes this page.
"""
WHO = {"engine": "engine", "stock": "stock `generate()`"}


def page(outcomes: Mapping[str, Outcome]) -> str:
    """Return the page. outcomes: by entry name. Raises ValueError where one of them is a fault."""
    import transformers

    found = [outcomes[entry.name] for entry in CLASSES]
    faults = [entry.name for entry in CLASSES + FAMILIES if outcomes[entry.name].fault]
    if faults:
        raise ValueError(f"the page would not be true of {', '.join(faults)}")
    kinds = class_names()
    rows = {entry.model_type: _class_row(entry, kinds[entry.model_type], outcomes[entry.name]) for entry in CLASSES}
    rows |= {name: f"| {name} | {kinds[name]} | not tried | {why} | | |" for name, why in ABSENT.items()}
    return PAGE.format(
        version=".".join(transformers.__version__.split(".")[:2]),
        classes=len(set(kinds.values())),
        engine=sum(outcome.by == "engine" for outcome in found),
        stock=sum(outcome.by == "stock" for outcome in found),
        absent=len(ABSENT),
        flex=sum(outcome.flex == "exact" for outcome in found),
        rows="\n".join(rows[name] for name in sorted(rows)),
        variants="\n".join(f"| {entry.name} | {_who(outcomes[entry.name])} |" for entry in FAMILIES),
    )


def class_names() -> dict[str, str]:
    """Return the class of each model type that transformers knows as a causal model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _class_row(entry: Entry, kind: str, outcome: Outcome) -> str:
    return f"| {entry.model_type} | {kind} | {_who(outcome)} |"


def _who(outcome: Outcome) -> str:
    """Return who answers, and why, without the figures and messages that change from machine to machine."""
    said = (re.sub(r"\s*\(.*", "", why, flags=re.DOTALL) for why in (outcome.why, outcome.sdpa, outcome.flex))
    return " | ".join([WHO[outcome.by], *said])
