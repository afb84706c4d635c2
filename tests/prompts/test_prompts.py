from dataclasses import replace

import pytest

from ragspec.config.sections import PromptConfig
from ragspec.errors import ConfigError, RecordError
from ragspec.prompts.builder import PromptBuilder, rank
from ragspec.records import Passage, Record
from ragspec.runners.fake import ByteTokenizer


class ChatTokenizer(ByteTokenizer):
    has_chat_template = True


def build(record, length=None, new=10, tokenizer=None, **config):
    builder = PromptBuilder(PromptConfig(**config), tokenizer or ByteTokenizer(), length)
    prompt = builder.build(record, new)
    return bytes(prompt.token_ids).decode(), prompt


def passages(*texts, scores=None):
    return tuple(Passage(str(i), text, score=scores[i] if scores else None) for i, text in enumerate(texts))


RECORD = Record("r", query="Why?", contexts=passages("aaa", "bbb", "ccc"))


def test_default_prompt_has_contexts_then_question():
    assert build(RECORD)[0] == "aaa\n\nbbb\n\nccc\n\nQuestion: Why?\nAnswer:"


def test_titles_stand_above_their_text():
    record = Record("r", query="q", contexts=(Passage("1", "text", "Title"),))
    assert build(record)[0].startswith("Title\ntext\n\n")


def test_chat_template_is_used_where_there_is_one_with_the_system_prompt_first():
    text, _ = build(RECORD, tokenizer=ChatTokenizer(), system="Be brief.")
    assert text == "system: Be brief.\nuser: aaa\n\nbbb\n\nccc\n\nQuestion: Why?"
    assert build(RECORD, tokenizer=ChatTokenizer(), chat=False)[0].endswith("Answer:")


def test_messages_keep_their_own_system_prompt():
    record = Record("r", messages=({"role": "system", "content": "own"}, {"role": "user", "content": "hi"}))
    assert build(record, tokenizer=ChatTokenizer(), system="config's")[0] == "system: own\nuser: hi"
    assert build(record, system="config's")[0] == "own\n\nhi"  # also without a chat template
    assert build(Record("r", messages=record.messages[1:]), system="config's")[0] == "config's\n\nhi"


def test_a_developers_message_is_a_system_prompt():
    record = Record("r", messages=({"role": "developer", "content": "own"}, {"role": "user", "content": "hi"}))
    assert build(record, tokenizer=ChatTokenizer(), system="config's")[0] == "developer: own\nuser: hi"


def test_a_raw_prompt_is_continued_as_it_is():
    assert build(Record("r", prompt="Once", raw=True), tokenizer=ChatTokenizer(), system="Be brief.")[0] == "Once"
    assert build(Record("r", prompt="Once"), tokenizer=ChatTokenizer())[0] == "user: Once"


def test_a_prompt_may_be_token_ids():
    record = Record("r", prompt=(72, 105), raw=True)
    assert build(record, tokenizer=ChatTokenizer())[1].token_ids == [72, 105]
    with pytest.raises(RecordError, match="the prompt has 2 tokens, over max_prompt_tokens"):
        build(record, max_prompt_tokens=1)


def test_query_prefix_stands_before_the_query():
    assert "Question: Briefly.\nWhy?" in build(RECORD, query_prefix="Briefly.\n")[0]


def test_whole_passages_are_dropped_from_the_lowest_ranked_end():
    text, prompt = build(RECORD, max_prompt_tokens=36)
    assert text == "aaa\n\nbbb\n\nQuestion: Why?\nAnswer:"
    assert [p.id for p in prompt.kept] == ["0", "1"]
    assert [p.id for p in prompt.dropped] == ["2"]


def test_scores_rank_passages_and_the_kept_ones_stay_in_their_order():
    record = Record("r", query="Why?", contexts=passages("aaa", "bbb", "ccc", scores=[0.1, 0.2, 0.9]))
    text, prompt = build(record, max_prompt_tokens=36)
    assert text.startswith("bbb\n\nccc\n\n")
    assert [p.id for p in prompt.dropped] == ["0"]
    assert rank(record.contexts) == [2, 1, 0]


def test_every_budget_keeps_as_many_passages_as_fit():
    record = Record("r", query="Why?", contexts=passages(*("x" * n for n in (1, 9, 2, 30, 4))))
    for budget in range(len("Why?\nAnswer:"), 120):
        text, prompt = build(record, max_prompt_tokens=budget)
        assert len(text) <= budget
        assert len(prompt.kept) + len(prompt.dropped) == 5
        if prompt.dropped:
            wider, _ = build(Record("r", query="Why?", contexts=record.contexts[: len(prompt.kept) + 1]))
            assert len(wider) > budget


def test_room_for_the_answer_is_kept_free():
    _, prompt = build(RECORD, length=46, new=10)
    assert len(prompt.dropped) == 1


@pytest.mark.parametrize("record", [RECORD, Record("r", prompt="x" * 40), Record("r", query="y" * 60)])
def test_a_prompt_too_long_even_without_contexts_is_an_error(record):
    with pytest.raises(RecordError, match=r"over the model's 20 less max_new_tokens \(10\)"):
        build(record, length=20, new=10)


@pytest.mark.parametrize("record", [replace(RECORD, query="y" * 40), Record("r", prompt="x" * 40)])
def test_a_prompt_too_long_says_what_would_make_it_fit(record):
    with pytest.raises(RecordError, match=r"; shorten it or lower max_new_tokens$"):
        build(record, length=20, new=10)
    with pytest.raises(RecordError, match=r"; shorten it$"):
        build(record, length=20, new=1)
    with pytest.raises(RecordError, match=r"; shorten it or raise prompt\.max_prompt_tokens$"):
        build(record, length=90, max_prompt_tokens=10)


def test_template_is_the_users():
    assert build(RECORD, template="{{ contexts | length }} for {{ query }} ({{ id }})")[0] == "3 for Why? (r)"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("prompts/mine.txt", "is the same for every record"),
        ("{{ query | nofilter }}", "not valid Jinja2"),
        ("{{ querry }}", '"querry" is not known; it may use query'),
        ("{% for %}", "not valid Jinja2"),
    ],
)
def test_a_bad_template_is_known_before_the_run(template, message):
    with pytest.raises(ConfigError, match=message):
        PromptBuilder(PromptConfig(template=template), ByteTokenizer(), None)


@pytest.mark.parametrize(
    "template",
    ["{{ query.__class__.__mro__ }}", "{{ contexts.__class__.__base__.__subclasses__() }}", "{{ metadata.x.y }}"],
)
def test_templates_are_sandboxed_and_strict(template):
    with pytest.raises(RecordError, match=r"prompt.template"):
        build(RECORD, template=template)


def test_chat_asked_of_a_model_without_template_is_an_error():
    with pytest.raises(ConfigError, match="has no chat template"):
        build(RECORD, chat=True)


def test_an_empty_prompt_is_its_records_failure():
    with pytest.raises(RecordError, match="the prompt is empty"):
        build(RECORD, template="{% if query == 'other' %}{{ query }}{% endif %}")
