"""Contracts of the pieces: the residual, the sampling law, one verification, the drafters.

Accept x ~ q with probability min(1, p(x)/q(x)), else draw from the residual max(0, p - q) / sum.
What comes out has law p, for any p and q:

    min(p, q) + (1 - sum min(p, q)) residual(p, q) = min(p, q) + max(0, p - q) = p

`probabilities` is the one place where logits become p and q: temperature, top-k, renormalise,
top-p. The properties below define it; the worked examples are faults reported to other projects
(B01 ... B17), with the right values.
"""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from toys import Toy, distance, law_of, same_rows

import minispec

# Fixture F of the reports: acceptance 0.4, residual [5/6, 1/6, 0], output law p.
P, Q = np.array([0.6, 0.3, 0.1]), np.array([0.1, 0.2, 0.7])


def distributions(V):
    """Distributions over V tokens: zeros, tiny numbers and equal ones are common."""
    weight = st.sampled_from([0.0, 1.0, 1e-300]) | st.floats(0, 1)
    weights = st.lists(weight, min_size=V, max_size=V).filter(lambda w: sum(w) > 0)
    return weights.map(lambda w: np.array(w) / sum(w))


pairs = st.integers(1, 6).flatmap(lambda V: st.tuples(distributions(V), distributions(V)))
logits = st.lists(st.integers(-3, 3) | st.floats(-30, 30), min_size=1, max_size=8).map(np.array)


# --- the theorem, and the residual --------------------------------------------------------------


@given(pairs)
@example((P, Q))
@example((P, P))
@example((np.array([1.0, 0.0]), np.array([0.0, 1.0])))
def test_the_theorem(pair):
    p, q = pair
    accepted = np.minimum(p, q)
    rejected = 1 - accepted.sum()
    output = accepted + rejected * minispec.residual(p, q)
    assert np.abs(output - p).max() < 1e-15


@given(pairs)
@example((P, P))
@example((np.array([0.0, 1.0]), np.array([0.0, 1.0])))
def test_the_residual_is_a_distribution_on_tokens_that_p_wants_more_than_q(pair):
    p, q = pair
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        r = minispec.residual(p, q)
    assert (r >= 0).all()
    assert abs(r.sum() - 1) < 1e-15 * len(p)
    if (p > q).any():
        assert (r[p <= q] == 0).all()
    else:
        assert np.array_equal(r, p / p.sum())


def test_residual_of_F():
    assert np.allclose(minispec.residual(P, Q), [5 / 6, 1 / 6, 0], rtol=0, atol=1e-15)


def test_B04_no_residual_left():
    # p = q, one-hot: the sum is 0, and 0/0 must not be drawn from.
    one_hot, randomness = np.array([0.0, 1.0, 0.0]), minispec.Randomness(0)
    drawn = {
        minispec.token_rule([1], [one_hot, one_hot], [one_hot], randomness) for _ in range(10_000)
    }
    assert drawn == {(1, 1)}
    assert randomness.categorical(minispec.residual(one_hot, one_hot)) == 1


# --- one verification ---------------------------------------------------------------------------


def output_law(p, q, sampled_from=None):
    """The law of the first token of a round with K = 1, its proposal drawn from q."""

    def first_token(randomness):
        x = randomness.categorical(q if sampled_from is None else sampled_from)
        n, last = minispec.token_rule([x], [p, p], [q], randomness)
        return x if n else last

    return law_of(first_token)


def close(law, p):
    return distance(law, dict(enumerate(p))) < 1e-12


@given(pairs)
@example((P, Q))
def test_token_rule_has_law_p(pair):
    p, q = pair
    assert close(output_law(p, q), p)


def test_F_has_law_p_and_acceptance_four_tenths():
    assert close(output_law(P, Q), P)  # residual by softmax (B03): [.364, .377, .260]
    law = law_of(lambda r: minispec.token_rule([r.categorical(Q)], [P, P], [Q], r)[0])
    assert close(law, [0.6, 0.4])


def test_B01_a_deterministic_draft_has_a_one_hot_q():
    one_hot = minispec.point_mass(2, vocab=3)
    assert close(output_law(P, one_hot), P)
    # What the report saw, token 2 against the soft q, is indeed another law.
    assert close(output_law(P, Q, sampled_from=one_hot), [5 / 7, 1 / 7, 1 / 7])


def test_B06_q_is_the_one_that_was_sampled_from():
    filtered = minispec.probabilities(np.log(Q), top_p=0.85)
    assert np.allclose(filtered, [0, 2 / 9, 7 / 9], rtol=0, atol=1e-15)
    assert close(output_law(P, filtered), P)
    assert close(output_law(P, Q, sampled_from=filtered), [5 / 9, 1 / 3, 1 / 9])


def generated_law(p, q, N, **options):
    """The law of N tokens from generate, K = 1, with rows that do not look at the prefix."""

    def text(randomness):
        draft, target = minispec.ModelDraft(Toy(same_rows(q), 3)), Toy(same_rows(p), 3)
        options_now = dict(K=1, max_new_tokens=N, randomness=randomness) | options
        rounds = list(minispec.generate(target, [0], draft, **options_now))
        return tuple(x for r in rounds for x in r.tokens), sum(r.accepted for r in rounds)

    return law_of(text)


def test_B02_greedy_emits_the_targets_best_token_and_accepts_no_other():
    assert generated_law([0.3, 0.5, 0.2], [0.9, 0.1, 0.0], N=3, temperature=0.0) == {
        ((1, 1, 1), 0): 1.0
    }


def test_B05_top_p_shapes_the_target_as_well_as_the_draft():
    law = generated_law(P, Q, N=2, temperature=1.0, top_p=0.85)
    first = [sum(w for (x, _), w in law.items() if x[0] == i) for i in range(3)]
    assert np.allclose(first, [2 / 3, 1 / 3, 0], rtol=0, atol=1e-12)


def test_B17_the_first_proposal_is_verified():
    target = Toy(same_rows([0.0, 0.0, 1.0]), 3)
    for K in 1, 2, 4:
        draft = minispec.PromptLookup(longest=2, shortest=1)
        first = next(minispec.generate(target, [1, 1, 1], draft, K))
        assert first.proposals == [1] * K
        assert (first.tokens, first.accepted) == ([2], 0)


# --- the sampling law ---------------------------------------------------------------------------


def kept(p):
    return set(np.flatnonzero(p).tolist())


@given(logits, st.floats(0.05, 20), st.integers(0, 9), st.floats(0.001, 1))
@example(np.zeros(4), 1.0, 2, 1.0)
@example(np.zeros(4), 1.0, 0, 0.5)
@example(np.zeros(3), 1.0, 0, 0.001)
def test_probabilities_is_a_distribution_on_the_most_probable_tokens(z, T, k, top_p):
    full, p = minispec.probabilities(z, T), minispec.probabilities(z, T, k, top_p)
    assert p.dtype == np.float64
    assert (p >= 0).all() and abs(p.sum() - 1) < 1e-14
    best_first = np.argsort(-full, kind="stable").tolist()
    assert kept(p) <= set(best_first[: len(kept(p))])  # equals: the lower index wins
    alive = list(kept(p))
    assert np.allclose(p[alive], full[alive] / full[alive].sum(), rtol=1e-12, atol=0)


@given(logits, st.floats(0.05, 20), st.integers(0, 9))
def test_top_k_keeps_exactly_k(z, T, k):
    positive = kept(minispec.probabilities(z, T))
    p = minispec.probabilities(z, T, top_k=k)
    assert len(kept(p)) == min(k or len(z), len(positive))
    if k >= len(z) or k == 0:
        assert (p == minispec.probabilities(z, T, top_k=None)).all()


@given(logits, st.floats(0.05, 20), st.integers(0, 9), st.floats(0.001, 1))
def test_top_p_keeps_the_fewest_tokens_whose_mass_reaches_it(z, T, k, top_p):
    before = minispec.probabilities(z, T, k)
    nucleus = sorted(before[list(kept(minispec.probabilities(z, T, k, top_p)))])
    assert sum(nucleus) >= top_p - 1e-12
    assert sum(nucleus[1:]) < top_p + 1e-12


@given(logits)
@example(np.array([1.0, 3.0, 3.0]))
def test_temperature_0_is_a_one_hot_at_the_first_largest(z):
    p = minispec.probabilities(z, temperature=0)
    assert p[int(np.argmax(z))] == 1
    assert p.sum() == 1


def test_temperature_0_takes_the_first_of_equals():
    p = minispec.probabilities([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], temperature=0)
    assert p.tolist() == [[0, 1, 0], [1, 0, 0]]


@given(st.lists(logits.filter(lambda z: len(z) > 2), min_size=1, max_size=4), st.floats(0.3, 1))
def test_each_row_has_its_own_law(rows, top_p):
    rows = np.stack([z[:3] for z in rows])
    together = minispec.probabilities(rows, 0.8, 2, top_p)
    assert (together == [minispec.probabilities(z, 0.8, 2, top_p) for z in rows]).all()


def test_a_tiny_temperature_is_nearly_greedy():
    assert minispec.probabilities([1.0, 1.1, 0.0], temperature=1e-300).tolist() == [0, 1, 0]


def test_float32_logits_give_a_float64_law():
    assert minispec.probabilities(np.zeros(3, np.float32)).dtype == np.float64


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_damaged_logits_are_refused(bad, temperature):
    with pytest.raises(ValueError, match="NaN or infinity"):
        minispec.probabilities([0.0, bad, 1.0], temperature)
    with pytest.raises(ValueError, match="NaN or infinity"):
        minispec.probabilities([-np.inf, -np.inf], temperature)


@pytest.mark.parametrize(
    "parameter, value",
    [("temperature", -0.1), ("temperature", np.nan), ("temperature", np.inf), ("top_k", -1)]
    + [("top_p", value) for value in (0.0, -0.5, 1.1, np.nan)],
)
def test_a_parameter_outside_its_range_is_refused(parameter, value):
    with pytest.raises(ValueError, match=parameter):
        minispec.probabilities([0.0, 1.0], **{parameter: value})


# --- the sampling law by hand -------------------------------------------------------------------


def law_by_hand(p, **filters):
    return minispec.probabilities(np.log(p), **filters)


def test_B02_one_hot_over_a_large_vocabulary():
    p = minispec.probabilities(np.random.default_rng(0).normal(size=128_000), temperature=0)
    assert np.count_nonzero(p == 1) == 1
    assert np.count_nonzero(p == 0) == 127_999


@pytest.mark.parametrize(
    "p, top_p, expected",
    [
        ([0.5, 0.41, 0.09], 0.9, [0.549451, 0.450549, 0]),
        ([0.5, 0.3, 0.15, 0.05], 0.6, [0.625, 0.375, 0, 0]),
        ([0.5, 0.3, 0.15, 0.05], 0.85, [0.526316, 0.315789, 0.157895, 0]),
        (P, 0.85, [2 / 3, 1 / 3, 0]),
    ],
)
def test_B10_top_p_keeps_the_token_that_crosses_and_no_more(p, top_p, expected):
    assert np.allclose(law_by_hand(p, top_p=top_p), expected, rtol=0, atol=5e-7)


def test_B10_top_p_reached_exactly_is_reached():
    p = law_by_hand([0.5, 0.25, 0.125, 0.125], top_p=0.75)
    assert np.allclose(p, [2 / 3, 1 / 3, 0, 0], rtol=0, atol=1e-15)


def test_equal_tokens_at_the_edge_of_top_k_go_by_index():
    assert law_by_hand([0.2, 0.3, 0.2, 0.3], top_k=3).round(9).tolist() == [0.25, 0.375, 0, 0.375]


def test_B12_top_k_renormalises_before_top_p():
    p = [0.35, 0.25, 0.20, 0.05, 0.03] + [0.02] * 6
    expected = [0.4375, 0.3125, 0.25] + [0] * 8  # without renormalising: four tokens
    assert np.allclose(law_by_hand(p, top_k=4, top_p=0.82), expected, rtol=0, atol=1e-12)
    assert kept(law_by_hand(p, top_k=1, top_p=0.8, temperature=0.01)) == {0}


def test_B15_float32_softmax_of_a_large_vocabulary_can_be_drawn_from():
    rng, randomness = np.random.default_rng(0), minispec.Randomness(0)
    for _ in range(200):
        z = 4 * rng.standard_normal(50_257, np.float32)
        softmax = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        assert softmax.dtype == np.float32
        assert 0 <= randomness.categorical(softmax) < 50_257


# --- what the drafters propose ------------------------------------------------------------------


def test_fit_width_cuts_or_pads():
    z = np.array([3.0, 1.0, 2.0])
    assert minispec.fit_width(z, 3).tolist() == [3, 1, 2]
    assert minispec.fit_width(z, 2).tolist() == [3, 1]
    assert minispec.fit_width(z, 5).tolist() == [3, 1, 2, -np.inf, -np.inf]


def test_prompt_lookup_by_hand():
    draft = minispec.PromptLookup(longest=2, shortest=1)
    draft.start(vocab=6, capacity=64)
    propose = lambda tokens: draft.propose(tokens, 3, law=None, randomness=None)[0]  # noqa: E731
    assert propose([1, 2, 3]) == []  # nothing occurred twice
    assert propose([1, 2, 3, 4, 1, 2]) == [3, 4, 1]  # what followed 1, 2
    assert propose([1, 2, 3, 4, 1, 2, 5, 2]) == [5, 2, 5]  # the latest 2, and on into the copy
    assert propose([1, 2, 3, 4, 1, 2, 5, 2, 3]) == [4, 1, 2]  # 2, 3 is longer than 3
    assert propose([1, 2, 3, 4, 1, 2, 5, 2, 3, 1, 2]) == [5, 2, 3]  # the latest 1, 2


def lookup(tokens, K, longest, shortest):
    """Prompt lookup by searching: the latest earlier place of the longest suffix that has one."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                copy = list(tokens)
                for i in range(K):
                    copy.append(copy[end + i])
                return copy[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.integers(1, 20),
    st.integers(0, 5),
    st.sampled_from([(3, 2), (2, 1), (1, 1), (4, 4)]),
)
@example([0, 1, 2, 0, 1], 5, 4, (3, 2))  # copies past the end: 2, 0, 1, 2
def test_prompt_lookup_copies_what_followed_the_longest_suffix(tokens, prompt, K, sizes):
    draft = minispec.PromptLookup(*sizes)
    draft.start(vocab=3, capacity=64)
    for length in range(min(prompt, len(tokens)), len(tokens) + 1):
        proposals, q = draft.propose(tokens[:length], K, law=None, randomness=None)
        draft.keep(length)
        assert proposals == lookup(tokens[:length], K, *sizes)
        assert [row.tolist() for row in q] == [[float(x == i) for i in range(3)] for x in proposals]


def frequent_lookup(tokens, K, longest, shortest):
    """The same, at the latest place whose next token follows that suffix most often."""
    for n in range(longest, shortest - 1, -1):
        ends = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[-n:]]
        if ends:
            followers = [tokens[e] for e in ends]
            most = max(map(followers.count, followers))
            at = max(e for e in ends if followers.count(tokens[e]) == most)
            copy = list(tokens)
            for i in range(K):
                copy.append(copy[at + i])
            return copy[len(tokens) :]
    return []


def test_frequent_lookup_by_hand():
    draft = minispec.PromptLookup(longest=1, shortest=1, frequent=True)
    draft.start(vocab=6, capacity=64)
    propose = lambda tokens: draft.propose(tokens, 1, law=None, randomness=None)[0]  # noqa: E731
    assert propose([1, 2, 1]) == [2]
    assert propose([1, 2, 1, 3, 1]) == [3]  # once each: the latest
    assert propose([1, 2, 1, 3, 1, 2, 1, 4, 1]) == [2]  # 2 twice, 4 once


@given(st.lists(st.integers(0, 2), min_size=1, max_size=25), st.integers(0, 4))
def test_frequent_lookup_copies_after_the_most_frequent_next_token(tokens, K):
    draft = minispec.PromptLookup(longest=3, shortest=1, frequent=True)
    draft.start(vocab=3, capacity=64)
    for length in range(1, len(tokens) + 1):
        proposals, q = draft.propose(tokens[:length], K, law=None, randomness=None)
        assert proposals == frequent_lookup(tokens[:length], K, 3, 1)
        assert [row.tolist() for row in q] == [np.eye(3)[x].tolist() for x in proposals]


@pytest.mark.parametrize("longest, shortest", [(0, 0), (2, 3), (3, -1)])
def test_sizes_of_n_grams_that_make_no_sense_are_refused(longest, shortest):
    with pytest.raises(ValueError, match="1 <= shortest <= longest"):
        minispec.PromptLookup(longest, shortest)
