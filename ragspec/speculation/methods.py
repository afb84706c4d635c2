"""The table of methods: the values of `speculation.method`, where each runs, what it needs and what it provides.

    >>> METHODS["context"].drafts_on
    ('huggingface', 'vllm')

A new drafter is one file in drafters/ and one row here; an external one is an entry point or is registered (see
`register`). Runners, config, schema, benchmark, tune, doctor, help and docs all use this table. Standard library only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from itertools import accumulate, takewhile
from numbers import Integral
from typing import Any

from ragspec.errors import ConfigError, did_you_mean, flat
from ragspec.host.compiler import Unbuilt
from ragspec.speculation.drafters.base import Draft, Drafter, NoDrafter, RowDrafter
from ragspec.speculation.drafters.context import ContextDrafter
from ragspec.speculation.drafters.prompt_lookup import PromptLookup
from ragspec.speculation.plugin_files import is_brought, is_from_file, load_plugins

PLAIN = "none"
FAKE, HF, VLLM = "fake", "huggingface", "vllm"
AUTO = "auto"  # as a runner and as a method: choose


@dataclass(frozen=True, slots=True)
class DrafterSettings:
    """What a config says to a drafter.

    Attributes:
        ngram_min, ngram_max: Shortest and longest n-gram (`speculation.ngram_min`, `ngram_max`); None for the drafter's
            own choice.
        isolate: Draft from the record's own text only (`speculation.isolate`).
        vocabulary: Number of token ids of the target model; None if it is not known.
        native: Whether code may be compiled for this machine (`runner_args.compile`).
    """

    ngram_min: int | None = None
    ngram_max: int | None = None
    isolate: bool = False
    vocabulary: int | None = None
    native: bool = True


Make = Callable[[DrafterSettings], Drafter]


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table.

    Attributes:
        summary: what drafts, in a few words.
        runners: the runners that support it.
        drafter: makes its Drafter, if it is one of ours or a plugin's.
        drafts_on: runners on which `drafter` itself drafts (in vLLM: through our proposer); answers can cite there.
        needs: keys of the section that it requires.
        takes_draft: it uses a draft model.
        some_models: it needs parts that only some models have.
        stock: transformers' generate() supports it.
        remembers: runners on which it also drafts from answers of earlier passes.
        tried: `method: auto` and `ragspec tune` try it; False for a new drafter that has shown nothing yet.
    """

    summary: str
    runners: tuple[str, ...]
    drafter: Make | None = None
    drafts_on: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    takes_draft: bool = False
    some_models: bool = False
    stock: bool = False
    remembers: tuple[str, ...] = ()
    tried: bool = True

    @property
    def is_deterministic(self) -> bool:
        """Whether the same text gets the same drafts; our engine's sampled answers are then those of plain decoding."""
        return self.drafter is not None

    def cites_on(self, runner: str) -> bool:
        """Return whether its answers on `runner` can cite the passages that they copy."""
        return runner in self.drafts_on


def _prompt_lookup(settings: DrafterSettings) -> Drafter:
    smallest = settings.ngram_min or 1
    largest = settings.ngram_max or max(3, smallest)
    if not settings.native:
        return PromptLookup(smallest, largest)
    from ragspec.speculation.drafters.native import native_lookup

    try:
        return native_lookup(smallest, largest)
    except Unbuilt as reason:
        return _noted(PromptLookup(smallest, largest), reason)


def _context(settings: DrafterSettings) -> Drafter:
    if not settings.native:
        return ContextDrafter(settings.isolate)
    from ragspec.speculation.drafters.native import native_context

    try:
        return native_context(settings.isolate)
    except Unbuilt as reason:
        return _noted(ContextDrafter(settings.isolate), reason)


def _noted(drafter: ContextDrafter | PromptLookup, reason: Unbuilt) -> Drafter:
    drafter.note = f"drafting: ragspec's Python code is used, which is slower, because {reason}"
    return drafter


DRAFT = ("draft_model",)
METHODS = {
    PLAIN: Method("nothing: plain decoding", (FAKE, HF, VLLM), stock=True),
    "auto": Method(
        "the fastest of the methods that the config allows, found during the run",
        (HF, VLLM),
        drafts_on=(HF, VLLM),
        takes_draft=True,
        stock=True,
    ),
    "context": Method(
        "the retrieved passages, the record's own text and other records' texts, by n-gram",
        (HF, VLLM),
        drafter=_context,
        drafts_on=(HF, VLLM),
    ),
    "grammar": Method(
        "what the grammar of a structured answer forces, and nothing else",
        (HF, VLLM),
        lambda settings: NoDrafter(),
        drafts_on=(HF, VLLM),
        tried=False,
    ),
    "prompt_lookup": Method(
        "the record's own text, by n-gram", (FAKE, HF, VLLM), _prompt_lookup, drafts_on=(HF,), stock=True
    ),
    "draft_model": Method("a smaller model", (HF, VLLM), needs=DRAFT, takes_draft=True, stock=True),
    "early_exit": Method("the model's own first layers", (HF,), needs=("early_exit_layer",), stock=True),
    "suffix": Method("a suffix tree of texts and earlier answers", (VLLM,), remembers=(VLLM,)),
    "eagle": Method("an EAGLE head", (VLLM,), needs=DRAFT, takes_draft=True),
    "eagle3": Method("an EAGLE-3 head", (VLLM,), needs=DRAFT, takes_draft=True),
    "medusa": Method("Medusa heads, in vLLM up to 0.32", (VLLM,), needs=DRAFT, takes_draft=True),
    "mtp": Method("the model's own multi-token prediction layers", (VLLM,), some_models=True),
    "dflash": Method("a DFlash block-diffusion draft", (VLLM,), needs=DRAFT, takes_draft=True),
    "speculative_config": Method("whatever vLLM's speculative_config says", (VLLM,), needs=("speculative_config",)),
}


def known_methods() -> dict[str, Method]:
    """Return the table with installed and registered plugins."""
    return METHODS | {
        name: Method(f"the drafter {name} (a plugin)", (HF, VLLM), drafter=make, drafts_on=(HF, VLLM))
        for name, make in plugins().items()
        if name not in METHODS
    }


def find(word: str) -> Method | None:
    """Return the row of `word`, None without one. Entry points are searched only if the table lacks the word."""
    return METHODS.get(word) or known_methods().get(word)


def method_named(word: str) -> Method:
    """Return the row of `word`. Raises ConfigError with suggestions for an unknown word."""
    found = find(word)
    if found is None:
        raise ConfigError(f'speculation.method: "{word}" is not known{did_you_mean(word, tuple(known_methods()))}')
    return found


def methods_of(runner: str) -> tuple[str, ...]:
    """Return the methods of `runner`, plain decoding first."""
    return tuple(word for word, method in known_methods().items() if runner in method.runners)


def model_free(runner: str) -> tuple[str, ...]:
    """Return the methods of `runner` that work with every model and need nothing else; `tune` tries them."""
    known = known_methods()
    free = [word for word in methods_of(runner) if not (known[word].needs or known[word].takes_draft)]
    return tuple(word for word in free if word != PLAIN and known[word].tried and not known[word].some_models)


def check_method(runner: str, word: str) -> None:
    """Raise ConfigError unless `runner` has the method `word`."""
    method = method_named(word)
    if runner not in method.runners:
        raise ConfigError(
            f'speculation.method: runner "{runner}" does not have "{word}" (it needs runner '
            f"{' or '.join(method.runners)}); choose one of {', '.join(methods_of(runner))}"
        )


def drafters_on(runner: str, method: str, settings: DrafterSettings) -> dict[str, Drafter]:
    """Return a new drafter for each kind that `method` may use on `runner`: its own, or all of ours for "auto"."""
    tried = {word: row for word, row in METHODS.items() if row.tried}
    rows = tried if method == "auto" else {method: method_named(method)}
    able = {word: row for word, row in rows.items() if method == "auto" or runner in row.drafts_on}
    return {word: row.drafter(settings) for word, row in able.items() if row.drafter is not None}


# -- external drafters -----------------------------------------------------------------------------

GROUP = "ragspec.drafters"
PRIOR_HITS, PRIOR_TRIALS = 1.0, 2.0  # of guesses without a probability
log = logging.getLogger(__name__)
registered: dict[str, Callable[[Any], Drafter]] = {}


def register(name: str, make: Callable[[Any], Drafter]) -> None:
    """Make `speculation.method: name` use a drafter of yours, in this process.

    Workers and other processes do not know it. An installed package registers one for all processes, vLLM's workers
    included, with an entry point:

        [project.entry-points."ragspec.drafters"]
        my-drafter = "my_package:MyDrafter"

    Errors of such a drafter cost drafts, not answers, and appear in the run's notes. Its guesses are checked: a
    draft is cut before an invalid token id, and a note names the first.

    Args:
        name: The word for `speculation.method`.
        make: Called with `DrafterSettings`, once per run; returns a `Drafter`. A class that takes the settings will do.

    Raises:
        ConfigError: ragspec already has a method of that name, or the name is empty.
        TypeError: `name` is not a text, or `make` cannot be called.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a drafter must be a text, not {type(name).__name__}")
    if not name.strip():
        raise ConfigError("the name of a drafter is empty; give the word for speculation.method")
    if not callable(make):
        kind = type(make).__name__
        raise TypeError(
            f'drafter "{name}": {kind} cannot be called; give a class, or a function that returns a drafter'
        )
    if name in METHODS:
        raise ConfigError(f'drafter "{name}": ragspec already has a method of that name; choose another')
    registered[name] = make


def plugins() -> dict[str, Callable[[DrafterSettings], Drafter]]:
    """Return the factories of external drafters by method name. Only files of `--plugin` are run for it."""
    load_plugins(register, registered)
    installed: dict[str, Callable[[Any], Drafter]] = {
        point.name: partial(_made_by, point) for point in entry_points(group=GROUP)
    }
    return {name: partial(GuardedDrafter, name, make) for name, make in {**installed, **registered}.items()}


def methods_of_files() -> list[str]:
    """Return the methods that files of `--plugin` bring. Runs them."""
    load_plugins(register, registered)
    return sorted(name for name, make in registered.items() if is_from_file(make))


def is_local(name: str) -> bool:
    """Return whether a method is a drafter that only this process knows, as its code registered it."""
    return name not in METHODS and name in registered and not is_brought(name, registered[name])


def notes_on(drafters: Iterable[Drafter]) -> list[str]:
    """Return what a user should know: drafters that have failed, or are slower than they could be."""
    ours = (ContextDrafter, PromptLookup, GuardedDrafter)
    return list(dict.fromkeys(drafter.note for drafter in drafters if isinstance(drafter, ours) and drafter.note))


def any_faulty(drafters: Iterable[Drafter]) -> bool:
    """Return whether an external drafter failed, or proposed what is no draft."""
    return any(isinstance(drafter, GuardedDrafter) and drafter.note for drafter in drafters)


def _made_by(point: EntryPoint, settings: DrafterSettings) -> Drafter:
    """Return the drafter of an entry point, whose module is imported only now."""
    made: Drafter = point.load()(settings)
    return made


class GuardedDrafter:
    """An external drafter whose errors disable it. note: in words, the first error, else the first invalid draft."""

    def __init__(self, name: str, make: Callable[[Any], Drafter], settings: DrafterSettings) -> None:
        self._name = name
        self._vocabulary = settings.vocabulary
        self.note = ""
        self.hits, self.trials = PRIOR_HITS, PRIOR_TRIALS
        self._failed = False
        self._inner: Drafter | None = self.tried("start", lambda: _given(make(settings), "drafter"))

    def open(self, prompt: Sequence[int], passages: Sequence[tuple[int, int]] = ()) -> RowDrafter:
        """Return the drafter of one record."""
        inner = self._inner
        if inner is None:
            return _GuardedRow(self, None)
        opened = self.tried("open", lambda: _given(inner.open(prompt, passages), "drafter of the record"))
        return _GuardedRow(self, opened)

    def tried(self, what: str, call: Callable[[], Any]) -> Any:
        """Return the result of `call`; None if it raises or anything failed before."""
        if self._failed:
            return None
        try:
            return call()
        except Exception as error:  # external code may raise anything; answers do not depend on it
            log.debug("the drafter %s failed", self._name, exc_info=error)
            self.note = (
                f"the drafter {self._name} failed in {what} ({type(error).__name__}: {flat(error, 120)}); "
                "it drafted no more after that"
            )
            self._failed, self._inner = True, None
            return None

    def checked(self, draft: Draft, limit: int) -> Draft:
        """Return the valid part of `draft`, with a probability for every guess."""
        width = self._vocabulary
        wanted = draft.token_ids[:limit]
        ids = takewhile(lambda i: type(i) is int and i >= 0 and (width is None or i < width), wanted)
        token_ids = list(ids)
        count = len(token_ids)
        if count < len(wanted) and not self.note:
            self.note = self._complaint(wanted[count])
        acceptance = list(accumulate(draft.cumulative_acceptance[:count], min))
        if len(acceptance) < count:
            rate = self.hits / self.trials
            acceptance = [rate ** (depth + 1) for depth in range(count)]
        sources: list[int | None] = [None] * count
        if len(draft.sources) >= count:  # numpy's integers are some too, but no JSON
            given = list(draft.sources)[:count]
            sources = [int(place) if isinstance(place, Integral) and place >= 0 else None for place in given]
        return Draft(token_ids, acceptance, sources)

    def _complaint(self, token: Any) -> str:
        """Return the note on a draft with an invalid token id."""
        if type(token) is not int:
            why = f"{' '.join(repr(token).split()):.60} is not an int"
        elif self._vocabulary is None:
            why = f"token id {token} is negative"
        else:
            why = f"token id {token} is outside the model's vocabulary of {self._vocabulary}"
        return (
            f"the drafter {self._name} proposed an invalid draft ({why}); such drafts are cut before the invalid token"
        )


def _given(made: Any, what: str) -> Any:
    """Return what an external drafter has returned. Raises TypeError for None."""
    if made is None:
        raise TypeError(f"it returned None, not a {what}")
    return made


class _GuardedRow:
    """One record's guarded drafter."""

    def __init__(self, guard: GuardedDrafter, inner: RowDrafter | None) -> None:
        self._guard = guard
        self._inner = inner
        self._guessed: list[int] = []

    def propose(self, limit: int) -> Draft:
        inner = self._inner
        if inner is None:
            return Draft()
        draft = self._guard.tried("propose", lambda: self._guard.checked(inner.propose(limit), limit))
        if draft is None:
            return Draft()
        self._guessed = draft.token_ids
        return draft  # type: ignore[no-any-return]

    def extend(self, token_ids: Sequence[int]) -> None:
        for guess, token in zip(self._guessed, token_ids, strict=False):
            self._guard.trials += 1
            self._guard.hits += guess == token
            if guess != token:
                break
        self._guessed = []
        inner = self._inner
        if inner is not None:
            self._guard.tried("extend", lambda: inner.extend(token_ids))

    def close(self) -> None:
        inner = self._inner
        if inner is not None:
            self._guard.tried("close", inner.close)
