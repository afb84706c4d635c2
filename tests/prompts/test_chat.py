"""Chat templates of all sorts: without a system role, with content as parts, broken, called with arguments."""

import pytest

from ragspec.config.load import build_config
from ragspec.config.sections import PromptConfig
from ragspec.errors import ConfigError, RecordError
from ragspec.models.checks import model_notes
from ragspec.models.resolve import read_model_config, resolve
from ragspec.models.tokenizer import HFTokenizer, load_tokenizer
from ragspec.prompts.builder import PromptBuilder
from ragspec.records import Passage, Record
from ragspec.run.generate import generate as run
from tests.conftest import read_jsonl, train_tokenizer, write_jsonl

PLAIN = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
SILENT = PLAIN.replace(
    "<{{ m.role }}> {{ m.content }}\n", "{% if m.role != 'system' %}<{{ m.role }}> {{ m.content }}\n{% endif %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}> {% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %} | {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
NO_DEVELOPER = PLAIN.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('who?') }}{% endif %}",
)


def tokenizer_with(template, **special):
    inner = train_tokenizer(280, ["the user asks and the assistant answers: why, because of the tower"])
    inner.chat_template = template
    for key, word in special.items():
        setattr(inner, key, word)
    return HFTokenizer(inner)


def written(template, record, **config):
    tokenizer = tokenizer_with(template)
    builder = PromptBuilder(PromptConfig(**config), tokenizer, None)
    return tokenizer.inner.decode(builder.build(record, 8).token_ids), builder


QUERY = Record("q", query="Why?")


@pytest.mark.parametrize("template", [NO_SYSTEM, SILENT], ids=["refuses", "leaves out"])
def test_a_system_prompt_goes_before_the_first_question_where_there_is_no_system_role(template):
    text, builder = written(template, QUERY, system="Be brief.")
    assert text == "<user> Be brief.\n\nWhy?\n<assistant> "
    assert any("no system role" in note for note in builder.notes)
    chat = Record("q", messages=({"role": "system", "content": "S"}, {"role": "user", "content": "U"}))
    assert written(template, chat)[0] == "<user> S\n\nU\n<assistant> "


def test_a_system_prompt_stays_one_where_there_is_a_role_for_it():
    text, builder = written(PLAIN, QUERY, system="Be brief.")
    assert text == "<system> Be brief.\n<user> Why?\n<assistant> "
    assert not builder.notes


def test_a_system_prompt_alone_becomes_the_question():
    chat = Record("q", messages=({"role": "system", "content": "S"},))
    assert written(NO_SYSTEM, chat)[0] == "<user> S\n<assistant> "


def test_a_developers_prompt_is_a_system_prompt_where_it_has_no_role():
    chat = Record("q", messages=({"role": "developer", "content": "D"}, {"role": "user", "content": "U"}))
    assert written(NO_DEVELOPER, chat)[0] == "<system> D\n<user> U\n<assistant> "
    assert written(PLAIN, chat)[0] == "<developer> D\n<user> U\n<assistant> "
    assert written(NO_SYSTEM.replace("== 'system'", "in ['system', 'developer']"), chat)[0].startswith("<user> D\n\nU")


def test_a_template_that_wants_parts_gets_parts():
    chat = Record("q", messages=({"role": "system", "content": "S"}, {"role": "user", "content": "U"}))
    assert written(PARTS, chat)[0] == "<system> S | <user> U | <assistant> "
    assert written(PARTS, QUERY, system="S")[0] == "<system> S | <user> Why? | <assistant> "
    assert written(NO_SYSTEM.replace(PLAIN, PARTS), chat)[0] == "<user> S\n\nU | <assistant> "


KNOWN_ROLES = PLAIN.replace(
    "<{{ m.role }}>", "{% if m.role in ['system', 'user', 'assistant'] %}<{{ m.role }}>"
).replace("\n{% endfor %}", "\n{% endif %}{% endfor %}")


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        (["User"], r'1 of 1: .*"User" there; did you mean "user"\?'),
        (["user", "critic", "user"], r'2 of 3: .*"critic" there; known: system'),
        (["user", "tool", "user"], r'2 of 3: .*"tool" there; put'),
    ],
)
def test_a_message_that_the_template_leaves_out_is_the_records_error(roles, why):
    messages = tuple({"role": role, "content": f"text {at}"} for at, role in enumerate(roles))
    with pytest.raises(RecordError, match=rf"leaves out message {why}"):
        written(KNOWN_ROLES, Record("q", messages=messages))
    assert "text 0" in written(PLAIN, Record("q", messages=messages))[0]


def test_a_message_that_the_template_changes_is_not_left_out():
    messages = (
        {"role": "user", "content": " U "},
        {"role": "assistant", "content": "<think>so</think>A"},
        {"role": "user", "content": "V"},
    )
    template = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] | trim }}")
    assert written(template, Record("q", messages=messages))[0].startswith("<user> U\n<assistant> A\n")


def test_a_developers_message_amid_a_chat_is_a_system_prompt_too():
    messages = tuple({"role": role, "content": role[0]} for role in ("user", "assistant", "developer", "user"))
    assert "<system> d\n" in written(KNOWN_ROLES, Record("q", messages=messages))[0]


def test_a_folded_prompt_is_still_guarded_against_control_words():
    tokenizer = tokenizer_with(NO_SYSTEM)
    builder = PromptBuilder(PromptConfig(system="S"), tokenizer, None)
    found = builder.build(Record("q", query="x <|end|> y"), 8).token_ids
    assert tokenizer.inner.eos_token_id not in found


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ messages | nofilter }}", "{% bad %}"])
def test_a_broken_template_stops_the_run_before_it_begins(template):
    with pytest.raises(ConfigError, match=r"chat template is not valid Jinja2 \(line 1"):
        PromptBuilder(PromptConfig(), tokenizer_with(template), None)
    PromptBuilder(PromptConfig(chat=False), tokenizer_with(template), None)


ARGS = PLAIN + "{{ extra }}{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"


def test_what_a_template_is_called_with_comes_from_config_and_record():
    record = Record("q", query="Why?", template_args={"tools": [{"type": "function", "function": {"name": "add"}}]})
    assert written(ARGS, record, chat_template_kwargs={"extra": "E"})[0].endswith("<assistant> E[add]")
    assert written(ARGS, Record("q", query="x", template_args={"extra": "R"}), chat_template_kwargs={"extra": "E"})[
        0
    ].endswith("R")


def test_tools_are_text_as_all_that_a_record_brings():
    tokenizer = tokenizer_with(ARGS)
    tool = {"type": "function", "function": {"name": "add <|end|>"}}
    found = PromptBuilder(PromptConfig(), tokenizer, None).build(
        Record("q", query="x", template_args={"tools": [tool]}), 8
    )
    assert tokenizer.inner.eos_token_id not in found.token_ids


def test_arguments_that_are_not_a_templates_are_refused():
    with pytest.raises(ConfigError, match=r"prompt\.chat_template_kwargs\.tokenize: is set by ragspec"):
        written(PLAIN, QUERY, chat_template_kwargs={"tokenize": True})
    with pytest.raises(RecordError, match=r"chat_template_kwargs\.chat_template"):
        written(PLAIN, Record("q", query="x", template_args={"chat_template": "x"}))


def test_a_final_message_is_continued_and_a_prompt_may_have_no_begin_of_an_answer():
    messages = ({"role": "user", "content": "U"}, {"role": "assistant", "content": "Because"})
    args = {"continue_final_message": True, "add_generation_prompt": False}
    assert written(PLAIN, Record("q", messages=messages, template_args=args))[0].endswith("<assistant> Because")
    bare = Record("q", messages=messages[:1], template_args={"add_generation_prompt": False})
    assert written(PLAIN, bare)[0] == "<user> U\n"


@pytest.mark.parametrize("where", ["record", "config", "nowhere"])
def test_messages_that_end_with_an_answer_are_noted_unless_it_is_continued(where):
    messages = ({"role": "user", "content": "U"}, {"role": "assistant", "content": "Because"})
    args = {"continue_final_message": True}
    record = Record("q", messages=messages, template_args=args if where == "record" else {})
    _, builder = written(PLAIN, record, chat_template_kwargs=args if where == "config" else {})
    noted = [note for note in builder.notes if "1 records end with an assistant message" in note]
    assert len(noted) == (where == "nowhere")


@pytest.mark.parametrize("more", [{}, {"add_generation_prompt": False}])
def test_a_configs_continue_final_message_leaves_questions_to_be_answered(more):
    args = {"continue_final_message": True, **more}
    user, begun = {"role": "user", "content": "U"}, {"role": "assistant", "content": "Because"}
    assert written(PLAIN, QUERY, chat_template_kwargs=args)[0] == "<user> Why?\n<assistant> "
    asked, answered = Record("q", messages=(user,)), Record("q", messages=(user, begun))
    assert written(PLAIN, asked, chat_template_kwargs=args)[0] == "<user> U\n<assistant> "
    assert written(PLAIN, answered, chat_template_kwargs=args)[0] == "<user> U\n<assistant> Because"
    own = Record("q", messages=(user,), template_args={"continue_final_message": True})
    assert written(PLAIN, own, chat_template_kwargs=args)[0] == "<user> U"


@pytest.mark.parametrize("where", ["record", "config"])
def test_reasoning_that_a_continued_message_has_begun_is_reasoning(where):
    args = {"continue_final_message": True}
    begun = ({"role": "user", "content": "U"}, {"role": "assistant", "content": "<think>I wonder"})
    tokenizer = tokenizer_with(PLAIN)
    tokenizer.inner.add_tokens(["<think>", "</think>"])
    config = PromptConfig(chat_template_kwargs=args if where == "config" else {})
    record = Record("q", messages=begun, template_args=args if where == "record" else {})
    thinking = PromptBuilder(config, HFTokenizer(tokenizer.inner), None).build(record, 8).thinking
    assert thinking is not None
    assert thinking.inside


# -- what a template would leave out ---------------------------------------------------------------------------------

ROLES = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<{{ m.role }}> {{ m.content }}\n"
    "{% endif %}{% endfor %}<assistant> "
)
TOOLS = PLAIN.replace(
    "{{ m.content }}", "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% else %}{{ m.content }}{% endfor %}"
)
USER = {"role": "user", "content": "U"}
CALL = {
    "role": "assistant",
    "content": "I look it up.",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "find", "arguments": {}}}],
}
FOUND = {"role": "tool", "tool_call_id": "1", "content": "T"}


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([USER, {"role": "critic", "content": "D"}, USER], 'message 2 of 3: it does not write the role "critic"'),
        ([{"role": "human", "content": "H"}], 'message 1 of 1: it does not write the role "human"'),
        ([USER, {"role": "assistant", "content": "A"}, FOUND], 'message 3 of 3: it does not write the role "tool"'),
        ([USER, CALL, USER], 'message 2 of 3: it does not write "tool_calls"'),
    ],
    ids=["critic", "human", "tool", "tool_calls"],
)
def test_a_message_that_the_template_leaves_out_is_an_error(messages, where):
    with pytest.raises(RecordError, match=where):
        written(ROLES, Record("q", messages=tuple(messages)))


def test_what_says_nothing_and_what_a_template_rewrites_may_be_left_out():
    empty = Record("q", messages=(USER, {"role": "critic", "content": " "}, USER))
    assert written(ROLES, empty)[0] == "<user> U\n<user> U\n<assistant> "
    thought = {"role": "assistant", "content": "<think>because</think>So."}
    rewritten = PLAIN.replace("m.content", "m.content.split('</think>')[-1] | trim")
    assert written(rewritten, Record("q", messages=(USER, thought, USER)))[0].count("because") == 0
    called = Record("q", messages=(USER, CALL, FOUND))  # beside a call, many templates write no content
    assert written(TOOLS, called)[0] == "<user> U<assistant> [find]<tool> T<assistant> "


def test_documents_that_the_template_does_not_write_are_an_error():
    documents = {"documents": [{"title": "A", "text": "B"}]}
    with pytest.raises(RecordError, match='chat template does not write "documents"; put them into the messages'):
        written(PLAIN, Record("q", messages=(USER,), template_args=documents))
    reads = "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}" + PLAIN
    assert written(reads, Record("q", messages=(USER,), template_args=documents))[0].startswith("[B]<user>")


# -- begin of sequence --------------------------------------------------------------------------------------------


def with_bos(template, after=""):
    """A tokenizer that puts <s> before texts, as Llama's does, and `after` behind them."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    inner = train_tokenizer(280, ["once upon a time the user asks and the assistant answers"])
    inner.add_special_tokens({"bos_token": AddedToken("<s>", special=True)})
    bos = inner.bos_token_id
    inner.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"<s> $A {after}".strip(),
        pair="<s> $A <s> $B",
        special_tokens=[("<s>", bos), ("<|end|>", inner.eos_token_id)],
    )
    inner.chat_template = template
    return HFTokenizer(inner)


@pytest.mark.parametrize(
    ("record", "config"),
    [
        (Record("q", query="Why?"), {}),
        (Record("q", prompt="Once upon"), {"chat": False}),
        (Record("q", prompt="<s>Once upon"), {"chat": False, "allow_special_tokens": True}),
        (Record("q", prompt="<s><s>Once upon"), {"chat": False, "allow_special_tokens": True}),
        (Record("q", prompt="Once upon", raw=True), {}),
        (Record("q", prompt="<s>Once upon", raw=True), {"allow_special_tokens": True}),
        (Record("q", query="Why?"), {"chat": False, "template": "<s>Question: {{ query }}"}),
        (Record("q", query="Why?"), {"chat": False, "system": "<s>System"}),
        (Record("q", messages=({"role": "user", "content": "U"},)), {}),
    ],
)
def test_a_text_begins_with_one_begin_of_sequence_token(record, config):
    tokenizer = with_bos("{{ bos_token }}" + PLAIN)
    found = PromptBuilder(PromptConfig(**config), tokenizer, None).build(record, 8).token_ids
    assert found[0] == tokenizer.bos
    assert found.count(tokenizer.bos) == 1


def test_passages_are_found_behind_a_begin_of_sequence_token_that_was_dropped():
    tokenizer = with_bos(None)
    builder = PromptBuilder(PromptConfig(template="<s>{{ contexts[0].text }} {{ query }}"), tokenizer, None)
    found = builder.build(Record("q", query="Why?", contexts=(Passage("1", "once upon a time"),)), 8, locate=True)
    start, end = found.places[0]
    assert tokenizer.decode(found.token_ids[start:end]).strip() in "once upon a time"


@pytest.mark.parametrize(
    "record",
    [
        Record("q", query="Why?"),
        Record("q", query="Why?", contexts=(Passage("1", "once upon <|end|> a time"),)),
        Record("q", prompt="Once upon", raw=True),
    ],
)
def test_no_end_of_sequence_token_stands_before_the_answer(record):
    ending, plain = (PromptBuilder(PromptConfig(), with_bos(None, after), None) for after in ("<|end|>", ""))
    assert ending.build(record, 8, locate=True) == plain.build(record, 8, locate=True)


def test_an_end_of_sequence_token_that_the_user_writes_stays():
    record, config = Record("q", prompt="Once<|end|>", raw=True), PromptConfig(allow_special_tokens=True)
    ending, plain = (PromptBuilder(config, with_bos(None, after), None).build(record, 8) for after in ("<|end|>", ""))
    assert ending.token_ids == plain.token_ids
    assert with_bos(None).inner.convert_ids_to_tokens(plain.token_ids[-1]) == "<|end|>"


def test_token_ids_stay_as_they_are_and_a_missing_begin_is_told():
    tokenizer = with_bos(None)
    builder = PromptBuilder(PromptConfig(), tokenizer, None)
    assert builder.build(Record("q", prompt=(5, 6), raw=True), 8).token_ids == [5, 6]
    assert builder.build(Record("q", prompt=(tokenizer.bos, 6), raw=True), 8).token_ids == [tokenizer.bos, 6]
    assert builder.notes == ["1 prompts of token ids do not begin with the model's begin-of-sequence token"]


def test_a_prompt_without_special_tokens_has_none():
    tokenizer = with_bos(None)
    record = Record("q", prompt="Once", raw=True, special_tokens=False)
    assert tokenizer.bos not in PromptBuilder(PromptConfig(), tokenizer, None).build(record, 8).token_ids


# -- what a user should know ----------------------------------------------------------------------------------------


def notes_of(folder, tokenizer=None):
    source = resolve(str(folder))
    return model_notes(source, read_model_config(source), tokenizer or HFTokenizer(load_tokenizer(source)))


@pytest.mark.parametrize(
    ("content", "note"),
    [
        ("{", "cannot be read"),
        ("", "cannot be read"),
        ('{"eos_token_id": 99999}', "cannot generate its end token (99999"),
        ('{"eos_token_id": -1}', "cannot generate its end token (-1"),
    ],
)
def test_a_generation_config_that_is_odd_is_told(content, note, tiny, tmp_path):
    import shutil

    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(content)
    assert any(note in each for each in notes_of(tmp_path / "model"))
    assert notes_of(tiny) == []


@pytest.mark.parametrize("content", ["[]", '{"eos_token_id": "x"}', '{"eos_token_id": [true]}'])
def test_a_generation_config_that_cannot_be_is_refused(content, tiny, tmp_path):
    import shutil

    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match="model"):
        notes_of(tmp_path / "model")


def test_a_model_without_an_end_token_is_told(tiny, tmp_path):
    import json
    import shutil

    shutil.copytree(tiny, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        path = tmp_path / "model" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))
    tokenizer = HFTokenizer(load_tokenizer(resolve(tiny)))
    tokenizer.inner.eos_token = None
    assert notes_of(tmp_path / "model", tokenizer) == [
        "the model has no end token: answers end at max_new_tokens, or with a stop string"
    ]


def test_a_turn_that_ends_with_no_end_token_is_told(tiny):
    from tokenizers import AddedToken

    tokenizer = HFTokenizer(load_tokenizer(resolve(tiny)))
    tokenizer.inner.add_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.inner.chat_template = PLAIN.replace("{{ m.content }}", "{{ m.content }}<|im_end|>")
    turn = tokenizer.inner.convert_tokens_to_ids("<|im_end|>")
    tokenizer = HFTokenizer(tokenizer.inner)
    source = resolve(tiny)
    config = read_model_config(source)
    assert model_notes(source, config, tokenizer) == [
        'the chat template ends an answer with "<|im_end|>", which is not an end token of the model: answers may '
        f"continue with another turn; set sampling.stop_token_ids: [{turn}] to end them there"
    ]
    assert model_notes(source, config, tokenizer, stops=[turn]) == []
    assert model_notes(source, config, tokenizer, {"eos_token_id": [0, turn]}) == []
    tokenizer.inner.chat_template = PLAIN.replace("{{ m.content }}", "{{ m.content }}<|end|>")
    assert model_notes(source, config, tokenizer) == []


def test_a_chat_without_a_begin_of_sequence_token_is_told(tiny):
    assert "no begin-of-sequence token" in notes_of(tiny, with_bos(PLAIN))[0]
    assert notes_of(tiny, with_bos("{{ bos_token }}" + PLAIN)) == []


def test_a_model_without_a_chat_template_is_told(tiny, tmp_path):
    raw = {
        "model": tiny,
        "runner": "huggingface",
        "sampling": {"max_new_tokens": 2},
        "output": str(tmp_path / "out.jsonl"),
    }
    raw["input"] = write_jsonl(tmp_path / "in.jsonl", [{"query": "x"}, {"prompt": "y"}])
    raw["runner_args"] = {"compile": "off"}
    summary = run(build_config(raw))
    assert (
        "1 records are queries or messages, and the model has no chat template: they are written as plain text"
        in summary.notes
    )


def test_a_token_that_the_model_does_not_embed_is_that_records_error(tiny, tmp_path):
    import shutil

    from tokenizers import AddedToken

    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    tokenizer = load_tokenizer(resolve(tiny))
    tokenizer.add_tokens([AddedToken("tower", normalized=False)])
    tokenizer.save_pretrained(folder)
    raw = {
        "model": str(folder),
        "runner": "huggingface",
        "sampling": {"max_new_tokens": 2},
        "output": str(tmp_path / "out.jsonl"),
    }
    raw["input"] = write_jsonl(tmp_path / "in.jsonl", [{"id": "a", "prompt": "the tower"}, {"id": "b", "prompt": "it"}])
    raw["runner_args"] = {"compile": "off"}
    run(build_config(raw))
    lines = {line["id"]: line for line in read_jsonl(tmp_path / "out.jsonl")}
    assert 'token 400 ("tower"), but the model embeds only 0 to 399' in lines["a"]["error"]["message"]
    assert lines["b"]["output_tokens"] == 2
