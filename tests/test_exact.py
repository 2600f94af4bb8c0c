"""Theorem: the tokens of `generate` have exactly the target's joint law, whatever the draft.

    P(x_1 ... x_N) = product over i of p(x_i | prompt, x_1 ... x_(i-1))

(Leviathan et al. 2023, appendix A.1; Chen et al. 2023, theorem 1.) The production loop runs once
for every outcome of its coins and draws (toys.outcomes), so both sides are numbers, equal to 1e-12.

The same runs decide a second law, that of efficiency. A round emits y_1 ... y_n, all accepted, and
then y with probability

    product over i of min(p_i, q_i)(y_i)  *  (max(0, p - q)(y) if n < K, else p(y))

and the expected number of accepted proposals of every round follows. A draft that reads a stale
cache, or a bonus token that is not drawn, leaves the output law as it is: only this sees them.
"""

import functools
import itertools
import math

import numpy as np
import pytest
from toys import Toy, distance, exact_law, law_of, outcomes, random_rows, same_rows

import minispec

PROMPT = (0, 1)
SEEDS = range(24)
SHAPES = [(2, 3, 4), (3, 2, 3), (4, 1, 3)]  # V, K, N
every_shape = pytest.mark.parametrize("V, K, N", SHAPES)
every_rule = pytest.mark.parametrize("rule", minispec.RULES)


def languages(seed, V, draft_V=None):
    """Rows of a target and of a draft. Odd seeds have zeros: of p, of q, or of both."""
    zeros = seed % 2 == 1
    return random_rows(2 * seed, V, zeros), random_rows(2 * seed + 1, draft_V or V, zeros)


def speculative(p, V, draft, K, N, context=64, prompt=PROMPT, temperature=1.0, **options):
    """-> a function of the randomness: the text that generate emits with target rows p."""

    def text(randomness):
        rounds = minispec.generate(
            Toy(p, V, context), prompt, draft(), K, max_new_tokens=N, temperature=temperature,
            randomness=randomness, **options,
        )  # fmt: skip
        return tuple(x for r in rounds for x in r.tokens)

    return text


def model_draft(q, V, context=64):
    """-> a maker of drafters: each path starts with a new one."""
    return lambda: minispec.ModelDraft(Toy(q, V, context))


def lookup_draft():
    return minispec.PromptLookup(longest=2, shortest=1)


def check(law, expected):
    assert math.isclose(sum(law.values()), 1, abs_tol=1e-12)
    assert distance(law, expected) < 1e-12


# --- the joint law ------------------------------------------------------------------------------


@every_rule
@every_shape
def test_joint_law(V, K, N, rule):
    for seed in SEEDS:
        p, q = languages(seed, V)
        text = speculative(p, V, model_draft(q, V), K, N, verify=minispec.RULES[rule])
        check(law_of(text), exact_law(p, PROMPT, N))


def test_joint_law_of_a_few():
    # Quick: mutants.py asks it over and over.
    for seed, (V, K, N) in itertools.product(range(4), SHAPES):
        p, q = languages(seed, V)
        check(law_of(speculative(p, V, model_draft(q, V), K, N)), exact_law(p, PROMPT, N))


def joint_law_of_a_few_by(rule):
    for seed, (V, K, N) in itertools.product(range(4), SHAPES):
        p, q = languages(seed, V)
        law = law_of(speculative(p, V, model_draft(q, V), K, N, verify=rule))
        check(law, exact_law(p, PROMPT, N))


def test_joint_law_of_a_few_by_block():
    # Quick: mutants.py asks it over and over.
    joint_law_of_a_few_by(minispec.block_rule)


def test_joint_law_of_a_few_by_match():
    joint_law_of_a_few_by(minispec.match_rule)


@every_rule
@pytest.mark.parametrize("prompt", [(0, 1, 1, 0, 1), (1, 1, 1)])
def test_every_rule_with_prompt_lookup_a_stop_token_and_filters(rule, prompt):
    for seed, stop in itertools.product(range(4), [(), {0}]):
        p, _ = languages(seed, 3)
        options = dict(verify=minispec.RULES[rule], stop=stop, temperature=0.7, top_k=2, top_p=0.9)
        text = speculative(p, 3, lookup_draft, 2, 3, prompt=prompt, **options)
        check(law_of(text), exact_law(filtered_rows(p, 0.7, 2, 0.9), prompt, 3, stop))


def test_plain_decoding():
    for seed, (V, K, N) in itertools.product(range(8), SHAPES):
        p, _ = languages(seed, V)
        check(law_of(speculative(p, V, lambda: None, K, N)), exact_law(p, PROMPT, N))
        check(law_of(speculative(p, V, lambda: None, 0, N)), exact_law(p, PROMPT, N))


def test_autoregressive_is_the_specification():
    for seed, (V, _, N) in itertools.product(range(8), SHAPES):
        p, _ = languages(seed, V)
        stop = {0} if seed % 4 < 2 else ()

        def text(randomness, p=p, V=V, N=N, stop=stop):
            options = dict(max_new_tokens=N, temperature=1.0, stop=stop, randomness=randomness)
            return tuple(minispec.autoregressive(Toy(p, V), PROMPT, **options))

        check(law_of(text), exact_law(p, PROMPT, N, stop))


@pytest.mark.parametrize("V, K, N", [(2, 3, 4), (3, 2, 3)])
@pytest.mark.parametrize("prompt", [(0, 1, 1, 0, 1), (1, 1, 1), (0, 1, 0), (1,)])
def test_prompt_lookup(V, K, N, prompt):
    for seed in range(10):
        p, _ = languages(seed, V)
        text = speculative(p, V, lookup_draft, K, N, prompt=prompt)
        check(law_of(text), exact_law(p, prompt, N))


def test_prompt_lookup_of_a_few():
    # Quick: mutants.py asks it over and over.
    test_prompt_lookup(3, 2, 3, prompt=(0, 1, 0))


def test_a_round_is_cut_by_the_cap_wherever_it_falls():
    for seed, N in itertools.product(range(6), range(6)):
        p, q = languages(seed, 2)
        check(law_of(speculative(p, 2, model_draft(q, 2), 3, N)), exact_law(p, PROMPT, N))


@every_shape
def test_a_round_is_cut_by_a_stop_token(V, K, N):
    for seed, stop in itertools.product(range(8), [{0}, {V - 1}, {0, V - 1}]):
        p, q = languages(seed, V)
        law = law_of(speculative(p, V, model_draft(q, V), K, N, stop=stop))
        check(law, exact_law(p, PROMPT, N, stop))
        assert not any(x in stop for text in law for x in text[:-1])


def test_the_context_of_the_target_ends_a_text():
    for seed, room in itertools.product(range(8), [1, 2, 3, 4]):
        p, q = languages(seed, 2)
        text = speculative(p, 2, model_draft(q, 2), K=3, N=9, context=len(PROMPT) + room)
        check(law_of(text), exact_law(p, PROMPT, room))


def test_past_the_context_of_the_draft_the_text_goes_on():
    for seed, draft_context in itertools.product(range(8), [1, 2, 3, 4, 5]):
        p, q = languages(seed, 2)
        text = speculative(p, 2, model_draft(q, 2, draft_context), K=3, N=4)
        check(law_of(text), exact_law(p, PROMPT, 4))


# --- the law with filters -----------------------------------------------------------------------


def filtered(p, temperature, top_k, top_p):
    """The filters of Hugging Face in words, for one distribution without ties."""
    weights = [x ** (1 / temperature) for x in p]
    order = sorted(range(len(p)), key=lambda x: -weights[x])[: top_k or len(p)]
    mass = sum(weights[x] for x in order)
    kept = [x for i, x in enumerate(order) if sum(weights[y] for y in order[:i]) < top_p * mass]
    total = sum(weights[x] for x in kept)
    return [weights[x] / total if x in kept else 0.0 for x in range(len(p))]


def filtered_rows(p, *filters):
    return lambda prefix: filtered(p(prefix), *filters)


FILTERS = [(0.5, None, 1.0), (3.0, None, 1.0), (1.0, 2, 1.0), (1.0, 0, 0.7), (0.7, 3, 0.8)]


@pytest.mark.parametrize("temperature, top_k, top_p", FILTERS)
def test_filters_shape_the_target_law(temperature, top_k, top_p):
    for seed, (V, K, N) in itertools.product(range(6), [(3, 2, 3), (4, 1, 3)]):
        p, q = languages(seed, V)
        text = speculative(
            p, V, model_draft(q, V), K, N, temperature=temperature, top_k=top_k, top_p=top_p
        )
        check(law_of(text), exact_law(filtered_rows(p, temperature, top_k, top_p), PROMPT, N))


def test_filters_shape_the_target_law_of_a_few():
    # Quick: mutants.py asks it over and over.
    test_filters_shape_the_target_law(0.7, 3, 0.8)


def test_filters_shape_the_draft_law_too():
    # With a draft equal to the target every proposal is accepted, unless only one is filtered.
    p, _ = languages(0, 4)
    options = dict(max_new_tokens=3, temperature=0.7, top_k=3, top_p=0.8)

    def all_accepted(randomness):
        draft = minispec.ModelDraft(Toy(p, 4))
        rounds = minispec.generate(Toy(p, 4), PROMPT, draft, 2, randomness=randomness, **options)
        return all(r.accepted == len(r.proposals) for r in rounds)

    assert all(held for _, held in outcomes(all_accepted))


def test_temperature_0_is_greedy():
    for seed, (V, K, N) in itertools.product(range(20), SHAPES):
        p, q = languages(seed, V)
        law = law_of(speculative(p, V, model_draft(q, V), K, N, temperature=0.0))
        text = PROMPT
        for _ in range(N):
            text = (*text, int(np.argmax(p(text))))
        assert law == {text[len(PROMPT) :]: 1.0}


# --- vocabularies padded to other widths --------------------------------------------------------


@pytest.mark.parametrize("draft_V", [2, 3, 4, 6])
def test_draft_of_another_width(draft_V):
    # The draft has no zeros here: one that puts all its mass past the target's ids has no law.
    for seed in range(12):
        p, q = random_rows(seed, 3, zeros=seed % 2 == 1), random_rows(100 + seed, draft_V)
        law = law_of(speculative(p, 3, model_draft(q, draft_V), K=2, N=3))
        check(law, exact_law(p, PROMPT, 3))


def test_B36_draft_of_another_width_by_hand():
    p = same_rows([0.6, 0.3, 0.1])
    for q in [0.1, 0.2, 0.4, 0.3], [0.3, 0.7]:
        law = law_of(speculative(p, 3, model_draft(same_rows(q), len(q)), K=1, N=2))
        check(law, exact_law(p, PROMPT, 2))
        assert all(x < 3 for text in law for x in text)


def test_B36_a_narrower_draft_goes_on_after_an_id_past_its_own():
    p, q = random_rows(5, 3), random_rows(6, 2)
    check(law_of(speculative(p, 3, model_draft(q, 2), K=1, N=3)), exact_law(p, PROMPT, 3))


# --- efficiency ---------------------------------------------------------------------------------


def first_round(p, q, prefix, K):
    """Yields (probability, n, tokens) of a round after `prefix`: the formula at the file's top."""
    for n in range(K + 1):
        for y in itertools.product(range(len(p(prefix))), repeat=n + 1):
            rows = [(p(prefix + y[:j]), q(prefix + y[:j])) for j in range(n + 1)]
            accepted = math.prod(min(pj[x], qj[x]) for (pj, qj), x in zip(rows, y[:n]))
            pn, qn = rows[n]
            last = pn[y[n]] if n == K else max(0.0, pn[y[n]] - qn[y[n]])
            yield accepted * last, n, y


def expected_accepted(p, q, prefix, K, rounds):
    """E[n] of the last of so many rounds."""
    if rounds == 1:
        return sum(probability * n for probability, n, _ in first_round(p, q, prefix, K))
    return sum(
        probability * expected_accepted(p, q, prefix + y, K, rounds - 1)
        for probability, _, y in first_round(p, q, prefix, K)
        if probability > 0
    )


def every_round(i, p, q, V, K, rule=minispec.token_rule):
    """Yields (probability, round): each way the i-th round of a text without end can go."""

    def play(randomness):
        rounds = minispec.generate(
            Toy(p, V), PROMPT, minispec.ModelDraft(Toy(q, V)), K, max_new_tokens=60,
            temperature=1.0, randomness=randomness, verify=rule,
        )  # fmt: skip
        return next(itertools.islice(rounds, i - 1, None))

    return outcomes(play)


def test_one_proposal_is_accepted_with_probability_sum_min_p_q():
    for seed, V in itertools.product(SEEDS, [2, 3, 4]):
        p, q = languages(seed, V)
        accepted = sum(w * r.accepted for w, r in every_round(1, p, q, V, K=1))
        assert abs(accepted - np.minimum(p(PROMPT), q(PROMPT)).sum()) < 1e-12


def accepted_by(rule, p, q, V, K):
    """E[n] of the first round."""
    return sum(w * r.accepted for w, r in every_round(1, p, q, V, K, minispec.RULES[rule]))


def test_block_on_the_toy_of_its_paper():
    p, q = same_rows([1 / 3, 2 / 3]), same_rows([2 / 3, 1 / 3])
    assert abs(accepted_by("token", p, q, 2, 2) - 10 / 9) < 1e-12
    assert abs(accepted_by("block", p, q, 2, 2) - 11 / 9) < 1e-12


@pytest.mark.parametrize("V, K", [(2, 2), (2, 3), (3, 2), (4, 2), (3, 1)])
def test_block_never_accepts_fewer_on_average_and_match_never_more(V, K):
    gained = 0
    for seed in SEEDS:
        p, q = languages(seed, V)
        token, block, match = (
            accepted_by(rule, p, q, V, K) for rule in ("token", "block", "match")
        )
        assert block > token - 1e-12 and match < token + 1e-12
        assert K > 1 or abs(block - token) < 1e-12
        gained += block > token + 1e-3
    assert K == 1 or gained > 5


def test_match_accepts_sum_p_q_and_all_rules_agree_on_point_masses():
    for seed in SEEDS:
        p, q = languages(seed, 3)
        assert abs(accepted_by("match", p, q, 3, 1) - p(PROMPT) @ q(PROMPT)) < 1e-12
        point = lambda prefix: np.eye(3)[sum(prefix) % 3]  # noqa: E731
        counts = [accepted_by(rule, p, point, 3, 2) for rule in minispec.RULES]
        assert max(counts) - min(counts) < 1e-12


@pytest.mark.parametrize("V, K, i", [(2, 3, 1), (3, 2, 1), (2, 2, 2), (3, 1, 2), (2, 1, 3)])
def test_accepted_proposals_and_tokens_of_a_round(V, K, i):
    for seed in range(12):
        check_efficiency(*languages(seed, V), V, K, i)


def test_accepted_proposals_and_tokens_of_a_second_round():
    # The first that can meet a stale cache. Quick: mutants.py asks it over and over.
    check_efficiency(*languages(0, 2), V=2, K=2, i=2)


def check_efficiency(p, q, V, K, i):
    rounds = list(every_round(i, p, q, V, K))
    expected = expected_accepted(p, q, PROMPT, K, i)
    assert abs(sum(w * r.accepted for w, r in rounds) - expected) < 1e-12
    assert abs(sum(w * len(r.tokens) for w, r in rounds) - (1 + expected)) < 1e-12


def test_the_draft_proposes_to_the_end_of_its_context():
    # Its last proposal may fall just past its context, for that one is never fed to it.
    p, draft = random_rows(0, 2), minispec.ModelDraft(Toy(random_rows(1, 2), 2, context=5))
    for length, proposals in (3, 3), (4, 2), (5, 1), (6, 0), (7, 0):
        r = next(minispec.generate(Toy(p, 2), [0] * length, draft, K=4))
        assert len(r.proposals) == proposals


def test_a_draft_equal_to_the_target_is_always_accepted():
    for seed, (V, K, _) in itertools.product(range(4), SHAPES):
        p, _ = languages(seed, V)
        for _, r in every_round(2, p, p, V, K):
            assert len(r.tokens) == K + 1 == r.accepted + 1


# --- rollback -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), {1}])
def test_after_every_round_the_caches_hold_what_was_emitted_but_for_the_last_token(stop):
    for seed in range(6):
        check_caches(*languages(seed, 2), 2, stop)


def test_caches_after_the_rounds_of_one_pair():
    # Quick: mutants.py asks it over and over.
    check_caches(*languages(1, 2), 2, stop=())


def check_caches(p, q, V, stop):
    for _ in outcomes(functools.partial(watch_caches, p, q, V, stop)):
        pass


def watch_caches(p, q, V, stop, randomness):
    target, draft, tokens = Toy(p, V), Toy(q, V), list(PROMPT)
    options = dict(max_new_tokens=5, temperature=1.0, stop=stop, randomness=randomness)
    for r in minispec.generate(target, PROMPT, minispec.ModelDraft(draft), K=2, **options):
        # The draft was fed all but its last proposal; nothing, if it proposed nothing.
        fed = len(tokens) + len(r.proposals) - 1 if r.proposals else draft.cache.length
        tokens += r.tokens
        assert target.cache.tokens == tokens[:-1]
        assert draft.cache.tokens == tokens[: min(fed, len(tokens) - 1)]
        assert r.cached == (target.cache.length, draft.cache.length)


# --- what a round reports, and what is refused --------------------------------------------------


def test_why_a_text_ended():
    p = same_rows([0.0, 1.0])
    cases = [
        ((), 5, 64, "length"),
        ((), 5, 7, "length"),
        ((), 6, 7, "context"),
        ({1}, 1, 64, "stop"),
    ]
    for stop, N, context, reason in cases:
        options = dict(max_new_tokens=N, stop=stop)
        *rounds, last = minispec.generate(Toy(p, 2, context), PROMPT, K=2, **options)
        assert last.ended == reason
        assert all(r.ended is None for r in rounds)


def test_a_round_reports_the_probabilities_of_its_proposals():
    for seed in range(4):
        p, q = languages(seed, 2)
        for _, r in every_round(1, p, q, 2, K=3):
            assert len(r.proposals) == 3
            assert r.tokens[: r.accepted] == r.proposals[: r.accepted]
            for i, x in enumerate(r.proposals):
                before = (*PROMPT, *r.proposals[:i])
                assert math.isclose(r.p[i], p(before)[x], abs_tol=1e-15)
                assert math.isclose(r.q[i], q(before)[x], abs_tol=1e-15)


@pytest.mark.parametrize(
    "prompt, K, options, rule",
    [
        ([], 4, {}, "prompt is empty"),
        ([0] * 8, 4, {}, "context of 8"),
        ([0, 2], 4, {}, "outside 0..1"),
        ([-1], 4, {}, "outside 0..1"),
        ([0], -1, {}, "K must be >= 0"),
        ([0], 4, {"max_new_tokens": -1}, "max_new_tokens must be >= 0"),
        ([0], 4, {"temperature": -1.0}, "temperature"),
        ([0], 4, {"top_k": -1}, "top_k"),
        ([0], 4, {"top_p": 0.0}, "top_p"),
    ],
)
def test_refused_with_the_rule(prompt, K, options, rule):
    target = Toy(same_rows([0.5, 0.5]), 2, context=8)
    with pytest.raises(ValueError, match=rule):
        next(minispec.generate(target, prompt, K=K, **options))
