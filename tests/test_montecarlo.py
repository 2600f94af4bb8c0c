"""Contract: with the real random generator too, the output has the target's law.

The exact tests replace the generator, so they cannot see one that is used badly: one uniform number
for a proposal and its correction, a generator seeded anew for every coin, u = 0 or nearly 1. Here
it runs as it is, and whole texts are counted: each text is a cell, with the exact expectation.

    X = sum over cells of (count - expected)^2 / expected        ~ chi-square, cells - 1 degrees

Each check alarms with probability 1e-6 if all is well. If the law is off by a total variation of
0.02, in whatever direction, it alarms with probability 0.99 at least: X is then noncentral, with

    lambda = n sum d^2 / p >= n (sum |d|)^2 = n (2 * 0.02)^2     (Cauchy-Schwarz)

which is worked out below, and tried by planting such an error. Fewer cells need fewer texts.
"""

import math
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from test_exact import filtered_rows
from toys import Toy, exact_law, random_rows

import minispec

SIGNIFICANCE, TV, SAMPLES = 1e-6, 0.02, 65_000
PROMPT = (0, 1)
JUST_BELOW_1 = np.nextafter(1.0, 0.0)

# Target and draft. Chosen by calculation: if a proposal shares its uniform number with its
# correction, the law of the first token is off by 0.09 here, and not at all for many other pairs.
P, Q = random_rows(8, 3), random_rows(9, 3)


# --- the chi-square test, its power -------------------------------------------------------------


def tail(x, degrees):
    """P(chi-square > x): the finite sum for whole degrees of freedom, all of its terms positive."""
    a, total = (0.5, math.erfc(math.sqrt(x / 2))) if degrees % 2 else (0.0, 0.0)
    while a < degrees / 2:
        total += math.exp(a * math.log(x / 2) - x / 2 - math.lgamma(a + 1))
        a += 1
    return total


def critical(degrees):
    """The x with tail(x) = SIGNIFICANCE, by bisection."""
    low, high = 0.1, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, degrees) > SIGNIFICANCE else (low, middle)
    return high


def power(n, degrees, tv):
    """P(alarm) for an error of that total variation: a Poisson mixture of central tails.

    At least that, for the sum ends where the weights have long vanished.
    """
    mean, x = n * (2 * tv) ** 2 / 2, critical(degrees)
    poisson = (math.exp(j * math.log(mean) - mean - math.lgamma(j + 1)) for j in range(300))
    return sum(weight * tail(x, degrees + 2 * j) for j, weight in enumerate(poisson))


def merged(law, n):
    """Groups of cells: one each, but for those with an expectation below 20, which share one.

    What an error moves between these goes unseen; in the checks below their mass is under 0.0002.
    """
    large = [[cell] for cell in law if n * law[cell] >= 20]
    small = [cell for cell in law if n * law[cell] < 20]
    return large + [small] * bool(small)


def alarms(counts, law):
    """Whether the counts {cell: number} contradict the law {cell: probability}."""
    n = sum(counts.values())
    if not set(counts) <= set(law):
        return True  # something impossible happened
    groups = merged(law, n)
    expected = np.array([n * sum(law[cell] for cell in group) for group in groups])
    observed = np.array([sum(counts.get(cell, 0) for cell in group) for group in groups])
    return ((observed - expected) ** 2 / expected).sum() > critical(len(groups) - 1)


def planted(law, tv):
    """The law with an error of total variation tv that is the hardest to see.

    Nearly half of the mass loses tv, the rest gains it, each cell in proportion to its own.
    """
    half, cells = [], sorted(law, key=law.get)
    while sum(law[cell] for cell in half) < 0.5:
        half.append(cells.pop())
    mass = sum(law[cell] for cell in half)
    factor = {cell: 1 - tv / mass if cell in half else 1 + tv / (1 - mass) for cell in law}
    return {cell: law[cell] * factor[cell] for cell in law}


def test_tail_is_that_of_the_tables():
    for x, degrees in (3.841459, 1), (5.991465, 2), (18.307038, 10), (37.652484, 25):
        assert math.isclose(tail(x, degrees), 0.05, rel_tol=1e-6)
    for x, degrees in (10.827566, 1), (29.588298, 10), (52.619656, 25):
        assert math.isclose(tail(x, degrees), 0.001, rel_tol=1e-6)
    assert math.isclose(critical(2), 2 * math.log(1e6), rel_tol=1e-9)


def test_a_planted_error_is_found():
    rng, law = np.random.default_rng(0), exact_law(P, PROMPT, 3)
    assert power(SAMPLES, len(law) - 1, TV) > 0.995
    assert power(SAMPLES, 35, TV) > 0.99  # the most degrees of freedom of any check below

    wrong = planted(law, TV)
    assert math.isclose(sum(abs(wrong[cell] - law[cell]) for cell in law) / 2, TV)
    tries = [rng.multinomial(SAMPLES, list(wrong.values())).tolist() for _ in range(500)]
    assert sum(alarms(dict(zip(law, counts)), law) for counts in tries) >= 0.99 * 500


def test_no_error_is_no_alarm():
    rng, law = np.random.default_rng(1), exact_law(P, PROMPT, 3)
    tries = [rng.multinomial(SAMPLES, list(law.values())).tolist() for _ in range(500)]
    assert not any(alarms(dict(zip(law, counts)), law) for counts in tries)


# --- whole texts --------------------------------------------------------------------------------


def model_draft():
    return minispec.ModelDraft(Toy(Q, 3))


def remembering(law):
    """The function of the logits, but computed once for each: the loop below is half as long."""
    known = {}

    def recall(logits, **filters):
        key = logits.shape, logits.tobytes()
        if key not in known:
            known[key] = law(logits, **filters)
            known[key].flags.writeable = False
        return known[key]

    return recall


def counts_of_texts(draft, K, N, samples, randomness, prompt=PROMPT, **filters):
    target, options = Toy(P, 3), dict(max_new_tokens=N, temperature=1.0, randomness=randomness)
    counts = Counter()
    with mock.patch.object(minispec, "probabilities", remembering(minispec.probabilities)):
        for _ in range(samples):
            rounds = minispec.generate(target, prompt, draft, K, **options, **filters)
            counts[tuple(x for r in rounds for x in r.tokens)] += 1
    return counts


def check_texts(counts, law):
    assert power(sum(counts.values()), len(law) - 1, TV) > 0.99
    assert not alarms(counts, law)
    assert alarms(counts, planted(law, TV))  # the same sample tells the two apart


def test_texts_have_the_law_of_the_target():
    counts = counts_of_texts(model_draft(), 2, 3, SAMPLES, minispec.Randomness(0))
    check_texts(counts, exact_law(P, PROMPT, 3))


def test_filtered_texts_have_the_filtered_law():
    filters, randomness = dict(top_k=2, top_p=0.9), minispec.Randomness(0)
    counts = counts_of_texts(model_draft(), 1, 2, 40_000, randomness, **filters)
    check_texts(counts, exact_law(filtered_rows(P, 1.0, 2, 0.9), PROMPT, 2))


def test_texts_with_prompt_lookup_have_the_law_of_the_target():
    # The prompt has its last token before, with a 1 after it, which is what gets proposed.
    draft, prompt = minispec.PromptLookup(longest=2, shortest=1), (0, 1, 0)
    counts = counts_of_texts(draft, 1, 2, 46_000, minispec.Randomness(0), prompt)
    check_texts(counts, exact_law(P, prompt, 2))


def small_sample_alarms(randomness):
    counts = counts_of_texts(model_draft(), 1, 2, 4000, randomness)
    return alarms(counts, exact_law(P, PROMPT, 2))


def test_texts_of_a_small_sample():
    # Finds errors of 0.07. Quick: mutants.py asks it over and over.
    assert power(4000, 8, 0.07) > 0.99
    assert not small_sample_alarms(minispec.Randomness(0))


def test_one_uniform_for_a_proposal_and_its_correction_is_found():
    class Shared(minispec.Randomness):
        """Right for each draw by itself. But that the proposal was rejected tells where its uniform
        number lies: where q > p. The correction, picked by the same number, is biased by that."""

        rejected = False

        def accept(self, a, b):
            accepted = super().accept(a, b)
            self.rejected = not accepted
            return accepted

        def categorical(self, distribution):
            self.u = self.u if self.rejected else self.rng.random()
            self.rejected = False
            return int(np.searchsorted(np.cumsum(distribution)[:-1], self.u, side="right"))

    class Fresh(Shared):
        """The same without the fault: `rejected` never holds."""

        rejected = property(lambda self: False, lambda self, value: None)

    assert small_sample_alarms(Shared(0))
    assert not small_sample_alarms(Fresh(0))


# --- coins and draws ----------------------------------------------------------------------------


def test_coins_and_draws_are_independent_and_have_their_laws():
    randomness, p = minispec.Randomness(0), np.array([0.2, 0.0, 0.5, 0.3])
    coin, draw = {True: 0.6, False: 0.4}, {0: 0.2, 2: 0.5, 3: 0.3}
    law = {
        (a, x, b, y): coin[a] * draw[x] * coin[b] * draw[y]
        for a in coin for x in draw for b in coin for y in draw
    }  # fmt: skip
    counts = Counter()
    for _ in range(SAMPLES):
        a, x = randomness.accept(0.3, 0.5), randomness.categorical(p)
        b, y = randomness.accept(0.3, 0.5), randomness.categorical(p)
        counts[a, x, b, y] += 1
    assert len(law) == 36
    assert not alarms(counts, law)


class Always:
    """A generator that has only one number."""

    def __init__(self, u):
        self.u = u

    def random(self):
        return self.u


def with_uniform(u):
    randomness = minispec.Randomness(0)
    randomness.rng = Always(u)
    return randomness


@pytest.mark.parametrize("u", [0.0, 5e-324, 0.5, JUST_BELOW_1])
def test_certain_coins_are_certain_at_both_ends_of_the_uniform(u):
    check_certain_coins(u)


def test_a_token_of_probability_0_never_passes():
    check_certain_coins(0.0)


def test_other_coins_fall_both_ways():
    for a in 5e-324, 1e-9, 0.5, 0.999:
        assert with_uniform(0.0).accept(a, 1.0)
        assert not with_uniform(JUST_BELOW_1).accept(a, 1.0)


def check_certain_coins(u):
    randomness, rng = with_uniform(u), np.random.default_rng(0)
    for q in [1.0, 0.1, 1e-9, 1e-300, *rng.random(1000)]:
        assert not randomness.accept(0.0, q)
        assert not randomness.accept(q, 0.0)
        assert randomness.accept(q, q)
        assert randomness.accept(1.0, q)
    assert not randomness.accept(0.0, 0.0)


def test_a_draw_is_never_of_probability_0():
    rng = np.random.default_rng(0)
    for p in random_rows(0, 7, zeros=True)((0,)), *rng.dirichlet(np.ones(5), 1000):
        p = np.concatenate([[0.0], p, [0.0, 0.0]])
        possible = np.flatnonzero(p)
        assert with_uniform(0.0).categorical(p) == possible[0]
        assert with_uniform(JUST_BELOW_1).categorical(p) == possible[-1]


# --- seeds (B58) --------------------------------------------------------------------------------


def text_of_seed(seed):
    randomness = minispec.Randomness(seed)
    options = dict(max_new_tokens=12, temperature=1.0, randomness=randomness)
    rounds = minispec.generate(Toy(P, 3), PROMPT, model_draft(), K=3, **options)
    return tuple(x for r in rounds for x in r.tokens)


def test_B58_a_seed_repeats_a_text_and_another_changes_it():
    assert text_of_seed(5) == text_of_seed(5)
    assert len({text_of_seed(seed) for seed in range(20)}) >= 2
    assert len({text_of_seed(None) for _ in range(20)}) >= 2


def test_B58_the_global_generator_is_left_alone():
    before = np.random.get_state()  # noqa: NPY002
    text_of_seed(0)
    after = np.random.get_state()  # noqa: NPY002
    assert all(np.array_equal(a, b) for a, b in zip(before, after))
