"""Contract: a cache changes how long a pass takes, and nothing else.

After every round, with t all tokens so far (prompt and emitted),

    the target's cache holds t[:-1], the draft's a beginning of it (one less if all were accepted);
    keys, values and logits equal those of one pass over the same tokens, freshly cached (1e-10);
    entries at or past `length` are dead: NaN written there changes no output bit.

Shown on tiny float64 checkpoints of every family, each drafted by a noisy copy of itself, so that
rounds with none, some and all proposals accepted follow each other. (The toys of test_exact.py show
the same of the loop alone: their cache is a list of tokens.)
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from toys import Toy, random_rows

import minispec
import model

FOLDER = Path(__file__).parent / "data" / "oracles"
NAMES = ["gpt2", "gpt2_prefix", "llama_gqa", "llama3", "mistral", "qwen2", "qwen2_tied", "qwen3"]
every_model = pytest.mark.parametrize("name", NAMES)
PROMPT = [1, 2, 3, 5, 8]


def load(name, context=None):
    m = model.load(FOLDER / name, model.numpy_backend("float64"))
    return resized(m, context) if context else m


def resized(m, context):
    config = dataclasses.replace(m.config, context=context)
    return model.Model(config, m.weights, m.backend, m.block)


def noisy_copy(m, seed=1, scale=0.3):
    """A draft that often agrees: every weight moved by a third of its tensor's deviation."""
    rng = np.random.default_rng(seed)

    def noisy(w):
        if isinstance(w, dict):
            return {name: noisy(value) for name, value in w.items()}
        if isinstance(w, list):
            return [noisy(value) for value in w]
        return w + scale * w.std() * rng.standard_normal(w.shape)

    return model.Model(m.config, noisy(m.weights), m.backend, m.block)


class Watched:
    """A model that remembers its newest cache, and the tokens and logits of its latest call."""

    def __init__(self, inner):
        self.inner, self.vocab, self.context = inner, inner.vocab, inner.context

    def new_cache(self, capacity):
        self.cache = self.inner.new_cache(capacity)
        return self.cache

    def __call__(self, tokens, cache, rows):
        self.tokens, self.logits = list(tokens), self.inner(tokens, cache, rows)
        return self.logits


def one_pass(m, tokens):  # -> the cache after it, logits [T, V]
    cache = m.new_cache(len(tokens))
    return cache, m(tokens, cache, rows=len(tokens))


def difference(a, b):  # largest, in units of the largest number of b
    assert a.shape == b.shape
    return np.abs(a - b).max() / np.abs(b).max()


def rounds_of(target, draft, prompt=PROMPT, K=3, N=20, temperature=1.0, seed=0, **options):
    return minispec.generate(
        target, prompt, minispec.ModelDraft(draft), K, max_new_tokens=N, temperature=temperature,
        randomness=minispec.Randomness(seed), **options,
    )  # fmt: skip


def greedy(target, prompt, N, **options):
    return list(minispec.autoregressive(target, prompt, max_new_tokens=N, **options))


def speculative(target, draft, prompt, K, N, **options):
    rounds = minispec.generate(target, prompt, draft, K, max_new_tokens=N, **options)
    return [x for r in rounds for x in r.tokens]


# --- after every round --------------------------------------------------------------------------


def check_against_one_pass(watched, tokens):
    """What the watched model has cached of `tokens`, and the logits it gave last."""
    n = watched.cache.length
    fresh, _ = one_pass(watched.inner, tokens[:n])
    assert difference(watched.cache.k[:, :, :, :n], fresh.k) < 1e-10
    assert difference(watched.cache.v[:, :, :n, :], fresh.v) < 1e-10
    _, logits = one_pass(watched.inner, watched.tokens)
    assert difference(watched.logits, logits[-len(watched.logits) :]) < 1e-10


@every_model
def test_cached_equals_recomputed_after_every_round(name):
    check_every_round(name)


def test_cached_equals_recomputed_for_one_model():
    # Quick: mutants.py asks it over and over.
    check_every_round("gpt2_prefix")


def check_every_round(name):
    target = Watched(load(name))
    draft = Watched(noisy_copy(target.inner))
    tokens, accepted = list(PROMPT), set()
    for r in rounds_of(target, draft):
        fed = len(tokens) + len(r.proposals) - 1 if r.proposals else draft.cache.length
        tokens += r.tokens
        assert target.cache.length == len(tokens) - 1
        assert draft.cache.length == min(fed, len(tokens) - 1)
        check_against_one_pass(target, tokens)
        check_against_one_pass(draft, tokens)
        accepted.add(r.accepted)
    assert accepted >= {0, 3}, "this pair shows too little: choose another seed"


@every_model
def test_dead_entries_are_never_read(name):
    target = Watched(load(name))
    draft = Watched(noisy_copy(target.inner))
    clean = list(rounds_of(target, draft))
    poisoned = []
    for r in rounds_of(target, draft):
        poisoned.append(r)
        for cache in target.cache, draft.cache:
            cache.k[:, :, :, cache.length :] = np.nan
            cache.v[:, :, cache.length :, :] = np.nan
    assert poisoned == clean


@every_model
def test_B18_the_target_as_its_own_draft_is_always_accepted(name):
    target = load(name)
    for temperature in 0.0, 1.0:
        rounds = list(rounds_of(target, target, [1], K=2, N=30, temperature=temperature))
        assert len(rounds) == 10
        assert all(r.accepted == len(r.proposals) == 2 for r in rounds)


@every_model
def test_greedy_speculation_equals_plain_greedy(name):
    target = load(name)
    for draft in minispec.ModelDraft(noisy_copy(target)), minispec.PromptLookup(2, 1):
        assert speculative(target, draft, PROMPT, 3, 24) == greedy(target, PROMPT, 24)


# --- the pieces a text is fed in ----------------------------------------------------------------


@every_model
def test_B21_B22_each_way_to_feed_gives_the_same_rows(name):
    m, tokens = load(name), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    _, expected = one_pass(m, tokens)
    for split in range(1, len(tokens)):
        cache = m.new_cache(len(tokens))
        assert difference(m(tokens[:split], cache, rows=split), expected[:split]) < 1e-10
        rest = m(tokens, cache, rows=len(tokens) - split)
        assert difference(rest, expected[split:]) < 1e-10
    cache = m.new_cache(len(tokens))
    steps = [m(tokens[: i + 1], cache, rows=1) for i in range(len(tokens))]
    assert difference(np.concatenate(steps), expected) < 1e-10


@every_model
def test_a_row_does_not_see_later_tokens(name):
    m, tokens = load(name), [3, 1, 4, 1, 5, 9]
    _, before = one_pass(m, tokens)
    _, after = one_pass(m, [*tokens[:-1], 7])
    assert difference(after[:-1], before[:-1]) < 1e-12
    assert difference(after[-1], before[-1]) > 1e-3


def test_each_way_and_no_later_token_for_two_models():
    # Quick: mutants.py asks it over and over.
    for name in "gpt2", "llama_gqa":
        test_B21_B22_each_way_to_feed_gives_the_same_rows(name)
        test_a_row_does_not_see_later_tokens(name)


@every_model
@pytest.mark.parametrize("rows", [1, 4, 5, 6, 12, 13])
def test_a_long_prompt_goes_through_in_pieces(name, rows):
    m, tokens = load(name), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
    fresh, expected = one_pass(m, tokens)
    m.LONGEST_PASS = 5
    for cached in range(len(tokens) - rows + 1):
        cache = m.new_cache(len(tokens))
        if cached:
            m(tokens[:cached], cache, rows=1)
        assert difference(m(tokens, cache, rows), expected[-rows:]) < 1e-10
        assert cache.length == len(tokens)
        assert difference(cache.k, fresh.k) < 1e-10


def test_a_long_prompt_for_one_model():
    # Quick: mutants.py asks it over and over.
    test_a_long_prompt_goes_through_in_pieces("llama_gqa", rows=6)


def test_no_pass_is_longer_than_a_piece_or_the_rows_asked_for():
    m, tokens = load("gpt2"), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
    m.LONGEST_PASS, lengths, feed = 5, [], m.feed
    m.feed = lambda new, cache: (lengths.append(len(new)), feed(new, cache))[1]
    for rows in 1, 7:
        m(tokens, m.new_cache(len(tokens)), rows)
    assert lengths == [5, 5, 3, 5, 1, 7]


# --- truncate, capacity, context ----------------------------------------------------------------


def test_truncate_forgets_and_refuses_what_is_not_there():
    m = load("llama_gqa")
    cache = m.new_cache(8)
    m(PROMPT, cache, rows=1)
    for length in -1, 6, 8:
        with pytest.raises(ValueError, match="truncate"):
            cache.truncate(length)
    assert cache.length == 5
    for length in 5, 2, 0:
        cache.truncate(length)
        assert cache.length == length


def test_a_pass_refuses_what_it_cannot_do():
    m = load("llama_gqa")
    cache = m.new_cache(6)
    m(PROMPT, cache, rows=1)
    for tokens, rows in (PROMPT, 1), ([*PROMPT, 1], 2), ([*PROMPT, 1], 0), ([*PROMPT, 1, 1], 1):
        with pytest.raises(ValueError):
            m(tokens, cache, rows)
    assert cache.length == 5
    full = m.new_cache(m.context + 1)
    with pytest.raises(ValueError, match="context"):
        m([1] * (m.context + 1), full, rows=1)


@every_model
def test_the_context_can_be_filled_to_its_last_token(name):
    target = load(name, context=29)
    draft = minispec.ModelDraft(noisy_copy(target))
    expected = greedy(target, PROMPT, 99)
    assert len(expected) == 29 - len(PROMPT)
    for K in 1, 4, 16:
        rounds = list(minispec.generate(target, PROMPT, draft, K, max_new_tokens=99))
        assert [x for r in rounds for x in r.tokens] == expected
        assert rounds[-1].ended == "context"


@every_model
def test_past_the_context_of_the_draft_the_text_goes_on(name):
    target = load(name)
    draft = minispec.ModelDraft(resized(noisy_copy(target), context=12))
    rounds = list(minispec.generate(target, PROMPT, draft, 3, max_new_tokens=20))
    assert [x for r in rounds for x in r.tokens] == greedy(target, PROMPT, 20)
    assert rounds[0].proposals and not rounds[-1].proposals


def test_B24_a_long_round_near_the_end_of_the_context():
    target, prompt = load("llama_linear", context=64), [i % 50 for i in range(56)]
    for draft in None, minispec.ModelDraft(noisy_copy(target)), minispec.PromptLookup(2, 1):
        tokens = speculative(target, draft, prompt, K=16, N=8)
        assert len(tokens) == 8
        assert tokens == greedy(target, prompt, 8)


# --- where a text ends --------------------------------------------------------------------------


def path(*tokens):
    """A toy that is certain of its path: after n tokens, whatever they are, comes tokens[n - 1]."""
    return Toy(lambda prefix: minispec.point_mass(tokens[len(prefix) - 1], 9), 9)


def test_B29_nothing_follows_a_stop_token():
    eos, target = 4, path(5, 6, 4, 7, 8)
    rounds = list(rounds_of(target, target, [1], K=4, N=5, temperature=0.0, stop={eos}))
    assert [r.tokens for r in rounds] == [[5, 6, eos]]
    assert (rounds[0].accepted, rounds[0].ended) == (3, "stop")


def test_B30_never_more_tokens_than_asked_for():
    target = Toy(random_rows(0, 5), 5)
    drafts = None, minispec.ModelDraft(Toy(random_rows(1, 5), 5)), minispec.ModelDraft(target)
    for draft in *drafts, minispec.PromptLookup(1, 1):
        for N in range(9):
            tokens = speculative(target, draft, [1, 2, 1], K=4, N=N)
            assert len(tokens) == N
            assert tokens == greedy(target, [1, 2, 1], 8)[:N]


def test_B32_several_stop_ids(tmp_path):
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(10)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    for named, stop in ("[7, 9]", {7, 9}), ("9", {9}), ("null", set()):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {named}}}')
        assert model.Tokenizer(tmp_path).stop == stop

    target = Toy(lambda prefix: minispec.point_mass(len(prefix) + 6, 12), 12)  # 7, 8, 9, ...
    assert speculative(target, None, [1], K=4, N=5, stop={9, 11}) == [7, 8, 9]
    assert speculative(target, None, [1], K=4, N=5, stop={7, 9}) == [7]


def test_B35_the_prompt_has_at_least_one_token():
    target = load("gpt2")
    draft = minispec.ModelDraft(noisy_copy(target))
    with pytest.raises(ValueError, match="prompt is empty"):
        speculative(target, draft, [], K=4, N=8)
    assert speculative(target, draft, [1], K=4, N=8) == greedy(target, [1], 8)


def test_the_models_above_are_of_every_family():
    kinds = {model.read_json(FOLDER / name / "config.json")["model_type"] for name in NAMES}
    assert kinds >= set(model.FAMILIES)
