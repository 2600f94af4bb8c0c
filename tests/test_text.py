"""Contract: ids and text turn into each other without loss, in pieces as well as in one go.

A stream's pieces joined are the whole text, and none of them holds half a character. Stop ids come
from every file that may name them. A chat template is code from a download: it runs boxed in.
"""

import json

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

import minispec
import model

TEXTS = ["I am testing", "naïve 日本語 😊", " leading, trailing ", "two  spaces\n\nand lines"]


def byte_level():
    """Every byte is a token, and a few merges: characters of several bytes span tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "e"), ("te", "s"), ("Ġ", "a"), ("Ġa", "m")]
    words = alphabet + ["".join(pair) for pair in merges]
    inner = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    return inner


def sentence_piece_like():
    """Words carry the space before them, and unknown characters are bytes, as in Llama 2."""
    letters = [*"abcdefghijklmnopqrstuvwxyzI,▁\n"]
    merges = [("a", "m"), ("▁", "am"), ("t", "e"), ("▁", "te"), ("s", "t")]
    words = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *letters, *map("".join, merges)]
    inner = tokenizers.Tokenizer(
        models.BPE(
            {w: i for i, w in enumerate(words)}, merges, byte_fallback=True, unk_token="<unk>"
        )
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    return inner


KINDS = {"byte level": byte_level(), "sentence piece": sentence_piece_like()}
every_kind = pytest.mark.parametrize("kind", KINDS)


def folder_of(path, inner=None, **files):
    """A checkpoint folder's text side: tokenizer.json, and name=content for other .json files."""
    (inner or byte_level()).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


# --- streaming ---------------------------------------------------------------------------------


def pieces(inner, ids):
    stream = minispec.TextStream(inner.decode)
    return [stream.push(x) for x in ids], stream.flush()


@every_kind
@given(text=st.text(max_size=30))
@example(text=TEXTS[0])
@example(text=TEXTS[1])
@example(text=TEXTS[2])
@example(text=TEXTS[3])
@example(text="\ufffd")  # a genuine one
def test_pieces_joined_are_the_text(kind, text):
    ids = KINDS[kind].encode(text).ids
    pushed, rest = pieces(KINDS[kind], ids)
    assert "".join(pushed) + rest == KINDS[kind].decode(ids)
    assert not any(piece.endswith("\ufffd") for piece in pushed)


@every_kind
def test_no_piece_holds_half_a_character(kind):
    ids = KINDS[kind].encode("naïve 日本語 😊").ids
    pushed, rest = pieces(KINDS[kind], ids)
    assert "\ufffd" not in "".join(pushed) and rest == "" and len(pushed) > 12
    assert pushed[-4:] == ["", "", "", "😊"]  # four bytes, one character


def test_text_comes_as_soon_as_it_is_whole():
    inner = byte_level()
    pushed, _ = pieces(inner, inner.encode("I am tests").ids)
    assert pushed == ["I", " am", " ", "tes", "t", "s"]


def test_a_torn_end_is_flushed():
    inner = byte_level()
    ids = inner.encode("ok 😊").ids[:-1]
    pushed, rest = pieces(inner, ids)
    assert "".join(pushed) == "ok " and "".join(pushed) + rest == inner.decode(ids)


@every_kind
def test_a_special_token_in_the_middle_loses_nothing(kind):
    inner = KINDS[kind]
    ids = [*inner.encode("I am").ids, inner.token_to_id("</s>"), *inner.encode("I am").ids[1:]]
    pushed, rest = pieces(inner, ids)
    assert "".join(pushed) + rest == inner.decode(ids)


# --- stop ids ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files, stop",
    [
        ({}, set()),
        ({"config": {"eos_token_id": 7}}, {7}),
        ({"config": {"eos_token_id": None}}, set()),
        ({"generation_config": {"eos_token_id": [7, 9]}}, {7, 9}),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [7, 9]}}, {5, 7, 9}),
        ({"config": {"eos_token_id": 0}}, {0}),
        ({"tokenizer_config": {"eos_token": "</s>"}}, {261}),
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}}}, {261}),
        ({"tokenizer_config": {"eos_token": "unheard of"}, "config": {"eos_token_id": 3}}, {3}),
    ],
)
def test_stop_ids_are_the_union_of_all_files(tmp_path, files, stop):
    assert model.Tokenizer(folder_of(tmp_path, **files)).stop == stop


# --- chat templates ----------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


def chatted(path, template, system=None, **more):
    folder_of(path, tokenizer_config={"chat_template": template, **more})
    tokenizer = model.Tokenizer(path)
    return tokenizer.decode(tokenizer.chat("hi", system), special=True)


@pytest.mark.parametrize(
    "template, text",
    [
        (TEMPLATE, "[user]hi"),
        (
            [{"name": "tool", "template": "x"}, {"name": "default", "template": TEMPLATE}],
            "[user]hi",
        ),
        ("{{ bos_token }}" + TEMPLATE, "<s>[user]hi"),
        (TEMPLATE + "{% if add_generation_prompt %}[assistant]{% endif %}", "[user]hi[assistant]"),
        ("{%- for m in messages -%}\n  {{ m.content | trim }}\n{%- endfor %}", "hi"),
        (
            "{% for m in messages %}\n{% if loop.first %}\n{{ m.content }}{% endif %}{% endfor %}",
            "hi",
        ),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "hi"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_what_templates_use_works(tmp_path, template, text):
    assert chatted(tmp_path, template, bos_token="<s>") == text


def test_a_system_message_comes_first(tmp_path):
    assert chatted(tmp_path, TEMPLATE, system="be brief") == "[system]be brief[user]hi"


def test_a_template_file_counts_too(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = model.Tokenizer(folder_of(tmp_path))
    assert tokenizer.decode(tokenizer.chat("hi")) == "[user]hi"


@pytest.mark.parametrize(
    "template, words",
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"),
        ("{{ messages.append(1) }}", "chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "chat template"),
        ("{{ messages[7]['content'] }}", "chat template"),
        ("{{ 1 / 0 }}", "chat template"),
    ],
)
def test_a_template_that_fails_is_one_clear_line(tmp_path, template, words):
    with pytest.raises(ValueError, match=words) as caught:
        chatted(tmp_path, template)
    assert "\n" not in str(caught.value)


def test_without_a_template_the_text_itself_is_continued(tmp_path):
    tokenizer = model.Tokenizer(folder_of(tmp_path))
    assert tokenizer.template is None
    assert tokenizer.decode(tokenizer.chat("hi")) == "hi"
    assert tokenizer.decode(tokenizer.chat("hi", system="be brief")) == "be brief\n\nhi"


# --- files and vocabularies --------------------------------------------------------------------


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        model.Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        model.Tokenizer(tmp_path)


def test_vocabularies_must_agree_on_every_id(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir(), (tmp_path / "c").mkdir()
    ours = model.Tokenizer(folder_of(tmp_path / "a"))
    assert model.same_vocabulary(ours, model.Tokenizer(folder_of(tmp_path / "b")))
    content = json.loads(byte_level().to_str())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    swapped = tokenizers.Tokenizer.from_str(json.dumps(content))
    assert not model.same_vocabulary(ours, model.Tokenizer(folder_of(tmp_path / "c", swapped)))
