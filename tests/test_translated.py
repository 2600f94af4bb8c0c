"""Contract: a draft of another tokenizer changes the speed, not the law.

It proposes only tokens that both vocabularies have, from its own law restricted to them and
renormalised (token-level intersection, Timor et al. 2025); it reads the others spelled in its own
tokens; after a rollback its cache holds the spelling of what stands. Vocabularies are compared by
the bytes that their tokens stand for.
"""

import numpy as np
import pytest
from test_cli import checkpoint, say, target  # noqa: F401 (fixtures)
from test_exact import PROMPT, check, filtered_rows, lookup_draft, speculative
from test_text import byte_level, folder_of, sentence_piece_like
from toys import Toy, exact_law, law_of, random_rows

import minispec
import model

# A target of three tokens and a draft of four: 1 is the draft's 3, 2 its 0; the target's 0 has no
# counterpart and is spelled in two tokens.
SHARED = {1: 3, 2: 0}
SPELLED = {0: (1, 2), 1: (3,), 2: (0,)}


def translated(q, context=64):
    return minispec.TranslatedDraft(Toy(q, 4, context), SHARED, SPELLED.get)


def languages(seed):  # the draft's has no zeros, for it must be able to say something shared
    return random_rows(2 * seed, 3, zeros=seed % 2 == 1), random_rows(2 * seed + 1, 4)


@pytest.mark.parametrize("rule", minispec.RULES)
@pytest.mark.parametrize("K, N", [(1, 3), (2, 3), (3, 3)])
def test_joint_law(rule, K, N):
    for seed in range(6):
        p, q = languages(seed)
        options = dict(verify=minispec.RULES[rule], stop={2} if seed % 3 == 0 else ())
        text = speculative(p, 3, lambda q=q: translated(q), K, N, **options)
        check(law_of(text), exact_law(p, PROMPT, N, options["stop"]))


def test_joint_law_with_filters_and_in_a_chain():
    for seed in range(4):
        p, q = languages(seed)
        chain = lambda q=q: minispec.Chain([lookup_draft(), translated(q)])  # noqa: E731
        text = speculative(p, 3, chain, 2, 3, temperature=0.7, top_k=2, top_p=0.9)
        check(law_of(text), exact_law(filtered_rows(p, 0.7, 2, 0.9), PROMPT, 3))


def checked(q):
    """A drafter that compares each q with its definition, and counts them."""

    class Checked(minispec.TranslatedDraft):
        seen = 0

        def propose(self, tokens, K, law, randomness):
            proposals, q = super().propose(tokens, K, law, randomness)
            for i, found in enumerate(q):
                text = tuple(y for x in [*tokens, *proposals[:i]] for y in SPELLED[x])
                row = self.model.rows(text)
                expected = np.array([0.0, row[3], row[0]])
                np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-12)
                self.seen += 1
            return proposals, q

    return Checked(Toy(q, 4), SHARED, SPELLED.get)


def test_q_is_the_drafts_law_on_the_spelled_text_restricted_and_renormalised():
    for seed in range(8):
        p, q = random_rows(2 * seed, 3), random_rows(2 * seed + 1, 4)
        draft = checked(q)
        rounds = list(minispec.generate(
            Toy(p, 3), PROMPT, minispec.Chain([lookup_draft(), draft]) if seed % 2 else draft, 3,
            max_new_tokens=20, temperature=1.0, randomness=minispec.Randomness(seed),
        ))  # fmt: skip
        text = [*PROMPT, *(x for r in rounds for x in r.tokens)]
        spelled = [y for x in text[:-1] for y in SPELLED[x]]
        assert draft.seen >= 3 and draft.cache.tokens == spelled[: draft.cached]


@pytest.mark.parametrize("context", [3, 5, 6])
def test_text_that_its_spelling_makes_too_long_is_not_drafted_for(context):
    p, q = languages(0)
    text = speculative(p, 3, lambda: translated(q, context), 2, 4)
    check(law_of(text), exact_law(p, PROMPT, 4))


def test_ids_without_a_row_in_the_model_are_left_out():
    p, q = languages(0)
    make = lambda: minispec.TranslatedDraft(  # noqa: E731
        Toy(q, 4), SHARED | {0: 7}, {**SPELLED, 0: (7,)}.get
    )
    check(law_of(speculative(p, 3, make, 2, 3)), exact_law(p, PROMPT, 3))


# --- vocabularies -------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    makers = {"a": byte_level, "b": sentence_piece_like}
    return [model.Tokenizer(folder_of(tmp_path / n, make())) for n, make in makers.items()]


def test_the_bytes_of_every_token(two):
    for tokenizer in two:
        for i, found in model.token_bytes(tokenizer).items():
            if not found.startswith(model.SPECIAL) and i:  # sentencepiece: 0 is <unk>
                text = tokenizer.inner.decode([5, i]).removeprefix(tokenizer.inner.decode([5]))
                if "\ufffd" not in text and found.isascii():
                    assert text == found.decode() or found in (b" ", b"\n"), (i, found, text)
    ours, theirs = map(model.token_bytes, two)
    assert sorted(x for x in ours.values() if len(x) == 1) == [bytes([b]) for b in range(256)]
    assert {b" am", b" te", b"tes"} & set(ours.values()) == {b" am", b"tes"}
    assert {b" am", b" te", b"\xff", b"\n"} <= set(theirs.values())


def test_tokens_are_shared_by_their_bytes_and_the_others_spelled(two):
    for one, other in (two, two[::-1]):
        ours, theirs = model.token_bytes(one), model.token_bytes(other)
        shared, spell = model.translation(one, other)
        assert len(shared) >= 256 and len(set(shared.values())) == len(shared)
        assert all(ours[i] == theirs[j] for i, j in shared.items())
        for i, text in ours.items():
            if not text.startswith(model.SPECIAL):
                assert b"".join(theirs[j] for j in spell(i)) == text


def test_the_same_vocabulary_needs_no_translation(two):
    assert model.same_vocabulary(two[0], two[0]) and not model.same_vocabulary(*two)


def test_a_draft_with_other_ids_drafts_and_the_answer_stays(say, tmp_path):  # noqa: F811
    plain = say("--draft", "none")
    draft = checkpoint(tmp_path / "draft", swap=True)
    status, out, error = say("--draft", str(draft), "--json", str(tmp_path / "o.json"))
    assert (status, out) == plain[:2] and "accepted" in error
