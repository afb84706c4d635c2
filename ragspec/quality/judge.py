"""A model as the judge of answers: is each right, going by its references? A second opinion beside the scores.

The judge is any config. It sees PROMPT, is held to the words yes and no, and decodes greedily. How often it agrees with
F1 is told, and a judge that does not is not worth listening to: small models say yes to everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ragspec.config.load import build_config
from ragspec.config.run import RunConfig
from ragspec.quality.graded import Graded
from ragspec.run.pipeline import Pipeline

RIGHT = 0.5  # the F1 from which an answer counts as right
LEAST = 16  # tokens of a verdict; what a judge thinks before it comes on top
VERDICTS = ("yes", "no")
PROMPT = """\
Question: {question}

Reference answers, all of them right:
{references}

Answer to be judged:
{answer}

Does the answer to be judged say the same as one of the reference answers? It may say more, and in other words, but \
nothing that contradicts them. Reply with yes or no."""


def judge_config(config: RunConfig) -> RunConfig:
    """Return a config as the judge's: the same model, held to its verdicts. How it thinks, and how long, stays."""
    raw: dict[str, Any] = config.model_dump()
    kept = {key: raw["prompt"][key] for key in ("system", "chat", "chat_template_kwargs", "split_reasoning")}
    raw["prompt"] = {"source": "query", "template": "{{ query }}", **kept}
    raw["sampling"] = {"max_new_tokens": max(LEAST, config.sampling.longest)}
    raw |= {"structured": {"choice": list(VERDICTS)}, "retrieval": None, "scale": None, "input": None}
    return build_config(raw, "--judge")


def verdicts(config: RunConfig, answers: Mapping[str, Graded], questions: Mapping[str, str]) -> dict[str, bool]:
    """Return whether the judge finds each answer right; an answer without reference or question has no verdict.

    Raises ConfigError and ModelError. What the judge leaves unsaid, or cannot be asked, has no verdict either.
    """
    found: dict[str, bool] = {}
    with Pipeline(judge_config(config)) as pipeline:
        for line in pipeline.answers(_asked(answers, questions)):
            if line.get("output") in VERDICTS:
                found[line["id"]] = line["output"] == "yes"
    return found


def _asked(answers: Mapping[str, Graded], questions: Mapping[str, str]) -> Iterator[dict[str, str]]:
    for name, answer in answers.items():
        if answer.references and name in questions:
            references = "\n".join(f"- {reference}" for reference in answer.references)
            text = PROMPT.format(question=questions[name], references=references, answer=answer.text)
            yield {"id": name, "query": text}
