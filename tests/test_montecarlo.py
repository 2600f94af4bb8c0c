"""Contract: with the real random generator too, the output has the target's law.

The exact tests replace the generator, so they cannot see one that is used badly: one uniform number
for a proposal and its correction, a generator seeded anew for every coin, u = 0 or nearly 1. Here
it runs as it is, and whole texts are counted: each text is a cell, with the exact expectation.

    X = sum over cells of (count - expected)^2 / expected        ~ chi-square, cells - 1 degrees

Each check alarms with probability 1e-6 if all is well. If the law is off by a total variation of
0.02, in whatever direction, it alarms with probability 0.99 at least: X is then noncentral, with

    lambda = n sum d^2 / p >= n (sum |d|)^2 = n (2 * 0.02)^2     (Cauchy-Schwarz)

which is worked out below, and tried by planting such an error.
"""

import math
from collections import Counter

import numpy as np
import pytest
from toys import Toy, exact_law, random_rows

import minispec

SIGNIFICANCE, TV, SAMPLES = 1e-6, 0.02, 70_000
PROMPT = (0, 1)
JUST_BELOW_1 = np.nextafter(1.0, 0.0)


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
    """P(alarm) for an error of that total variation: a Poisson mixture of central tails."""
    mean, x = n * (2 * tv) ** 2 / 2, critical(degrees)
    poisson = (math.exp(j * math.log(mean) - mean - math.lgamma(j + 1)) for j in range(1000))
    return sum(weight * tail(x, degrees + 2 * j) for j, weight in enumerate(poisson))


def merged(law, n):
    """Groups of cells: one each, but for those with an expectation below 20, which share one."""
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
    assert math.isclose(critical(2), 2 * math.log(1e6), rel_tol=1e-9)


def test_a_planted_error_is_found():
    rng, law = np.random.default_rng(0), exact_law(random_rows(6, 3), PROMPT, 3)
    assert power(SAMPLES, len(law) - 1, TV) > 0.995
    assert power(SAMPLES, 35, TV) > 0.99  # the most degrees of freedom of any check below

    wrong = planted(law, TV)
    assert math.isclose(sum(abs(wrong[cell] - law[cell]) for cell in law) / 2, TV)
    tries = [rng.multinomial(SAMPLES, list(wrong.values())).tolist() for _ in range(500)]
    assert sum(alarms(dict(zip(law, counts)), law) for counts in tries) >= 0.99 * 500


def test_no_error_is_no_alarm():
    rng, law = np.random.default_rng(1), exact_law(random_rows(6, 3), PROMPT, 3)
    tries = [rng.multinomial(SAMPLES, list(law.values())).tolist() for _ in range(500)]
    assert not any(alarms(dict(zip(law, counts)), law) for counts in tries)


# --- whole texts --------------------------------------------------------------------------------


def counts_of_texts(p, q, V, K, N, samples, seed):
    target, draft = Toy(p, V), minispec.ModelDraft(Toy(q, V))
    options = dict(max_new_tokens=N, temperature=1.0, randomness=minispec.Randomness(seed))
    counts = Counter()
    for _ in range(samples):
        rounds = minispec.generate(target, PROMPT, draft, K, **options)
        counts[tuple(x for r in rounds for x in r.tokens)] += 1
    return counts


def test_texts_have_the_law_of_the_target():
    p, q = random_rows(6, 3), random_rows(7, 3)
    law = exact_law(p, PROMPT, 3)
    counts = counts_of_texts(p, q, V=3, K=2, N=3, samples=SAMPLES, seed=0)
    assert not alarms(counts, law)
    assert alarms(counts, planted(law, TV))  # the same sample tells the two apart


def test_texts_of_a_small_sample():
    # Finds errors of 0.07. Quick: mutants.py asks it over and over.
    assert power(4000, 8, 0.07) > 0.99
    p, q = random_rows(6, 3), random_rows(7, 3)
    counts = counts_of_texts(p, q, V=3, K=1, N=2, samples=4000, seed=0)
    assert not alarms(counts, exact_law(p, PROMPT, 2))


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
    p, q = random_rows(6, 3), random_rows(7, 3)
    rounds = minispec.generate(
        Toy(p, 3), PROMPT, minispec.ModelDraft(Toy(q, 3)), K=3, max_new_tokens=12, temperature=1.0,
        randomness=minispec.Randomness(seed),
    )  # fmt: skip
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
