"""Contract: AdaptiveK loses little against the best fixed K, and the output law stays the target's.

    tokens(K) = 1 + a_1 + a_1 a_2 + ...,    time(K) = K c + v(K+1)

Its K follows from earlier rounds alone. Costs here are given, not timed, so every figure is exact.
"""

import itertools

import numpy as np
import pytest
from toys import Toy, distance, exact_law, law_of, random_rows

import minispec

V = [1.0, 1.03, 1.08, 1.1, 1.15, 1.15, 1.3, 1.3, 1.5]
AVX2 = [1.0, 2.2, 2.1, 2.3, 2.7, 3.0, 2.6, 2.6, 2.6]  # a BLAS without kernels for a few rows
SERIAL = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]


class Known(Toy):
    """A target that says 0 1 2 3 0 1 2 3 ..., whatever was before."""

    def __init__(self):
        super().__init__(lambda prefix: np.eye(4)[len(prefix) % 4], 4, context=2000)


class Guess(minispec.Drafter):
    """Right with probability alpha, of its text position, each proposal for itself."""

    def __init__(self, alpha, seed=0):
        self.alpha, self.seed = alpha, seed

    def start(self, vocab, capacity, seen=None):
        self.coins = np.random.default_rng(self.seed).random((capacity + 9, 9))

    def propose(self, tokens, K, law, randomness):
        at = len(tokens)
        right = [self.coins[at, i] < self.alpha(at) for i in range(K)]
        proposals = [(at + i + (not ok)) % 4 for i, ok in enumerate(right)]
        return proposals, [minispec.point_mass(x, 4) for x in proposals]


def cost(draft, K, v, c, N=300):
    """Of a text of N tokens, in one-row passes."""
    rounds = list(minispec.generate(Known(), [0], draft, K, max_new_tokens=N))
    assert sum(len(r.tokens) for r in rounds) == N
    return sum(len(r.proposals) * c + v[len(r.proposals)] for r in rounds)


TEXTS = {
    "useless": lambda at: 0.0,
    "poor": lambda at: 0.25,
    "fair": lambda at: 0.6,
    "good": lambda at: 0.85,
    "perfect": lambda at: 1.0,
    "changing": lambda at: 0.9 if at // 100 % 2 else 0.3,
}


@pytest.mark.parametrize("v, c", [(V, 0.05), (V, 0.25), (V, 2.3), (SERIAL, 0.05)])
def test_little_is_lost_against_the_best_fixed_K_of_every_text(v, c):
    ours, best = 0.0, 0.0
    for alpha, seed in itertools.product(TEXTS.values(), range(4)):
        draft = Guess(alpha, seed)
        fixed = [cost(draft, K, v, c) for K in range(9)]
        adapted = cost(minispec.AdaptiveK(draft, v, c), 8, v, c)
        assert adapted <= fixed[0] / 0.95  # never much slower than plain decoding
        ours, best = ours + adapted, best + min(fixed)
    assert ours <= 1.03 * best


@pytest.mark.parametrize("N", [64, 300])
def test_a_text_that_is_copied_is_noticed_early_where_the_prior_would_not_draft(N):
    def adapted(alpha):
        return cost(minispec.AdaptiveK(Guess(alpha), AVX2, 0.0), 8, AVX2, 0.0, N)

    fixed = cost(Guess(TEXTS["perfect"]), 8, AVX2, 0.0, N)
    assert adapted(TEXTS["perfect"]) <= 1.2 * fixed < 0.4 * N
    assert adapted(TEXTS["useless"]) <= N / 0.95


def test_a_useless_draft_is_probed_seldom_and_a_better_text_is_noticed():
    def rounds(alpha):
        draft = minispec.AdaptiveK(Guess(alpha), V, 0.1)
        return list(minispec.generate(Known(), [0], draft, 8, max_new_tokens=600))

    useless = [len(r.proposals) for r in rounds(lambda at: 0.0)]
    probes = [i for i, k in enumerate(useless) if k and i > 50]
    assert 3 < len(probes) and all(useless[i] == 1 for i in probes)
    price = 0.1 + V[1] - V[0]  # of a probe, of which 2 % of the time may be spent
    assert min(b - a for a, b in itertools.pairwise(probes)) > price / 0.02
    late = [len(r.proposals) for r in rounds(lambda at: float(at > 100))]
    assert late[-20] >= 4


def test_no_probe_where_perfect_acceptance_would_not_pay():
    draft = minispec.AdaptiveK(Guess(lambda at: 1.0), V, c=2.3)
    rounds = minispec.generate(Known(), [0], draft, 8, max_new_tokens=500)
    assert not any(r.proposals for r in rounds)


def test_the_best_K_by_hand():
    draft = minispec.AdaptiveK(minispec.Drafter(), [1.0, 1.2, 1.3], c=0.1)
    assert np.allclose(draft.gains([0.5, 0.8]), [1.0, 1.5 / 1.3, 1.9 / 1.5])
    draft.start(4, 9)
    assert np.allclose(draft.alpha(), [0.6, 0.6])
    draft.length, draft.proposed = 10, 2
    draft.keep(10)  # two proposals, none accepted: the second was never reached
    assert np.allclose(draft.alpha(), [2 * 0.4 / 3, 0.4])  # 1.2 / 3 of all together
    draft.length, draft.proposed = 11, 2
    draft.keep(13)  # both accepted
    of_all = (2 + 1.2) / (2.95 + 2)
    assert np.allclose(draft.alpha(), [(1 + 2 * of_all) / 3.95, (1 + 2 * of_all) / 3])


@pytest.mark.parametrize("rule", minispec.RULES)
@pytest.mark.parametrize("chained", [False, True])
def test_the_joint_law(rule, chained):
    """K depends on what was accepted before, and the law is the target's all the same."""
    for seed, stop in itertools.product(range(2), [(), {0}]):
        p, q = (random_rows(2 * seed + i, 2, zeros=seed % 2 == 1) for i in range(2))

        def text(randomness, p=p, q=q, stop=stop):
            draft = minispec.AdaptiveK(minispec.ModelDraft(Toy(q, 2)), [1.0, 1.1, 1.5, 1.6], 0.1)
            if chained:
                lookup = minispec.AdaptiveK(minispec.PromptLookup(2, 1), [1.0, 1.0, 1.9, 1.9], 0.0)
                draft = minispec.Chain([lookup, draft])
            rounds = minispec.generate(
                Toy(p, 2), (0, 1), draft, 3, max_new_tokens=5, temperature=1.0, stop=stop,
                randomness=randomness, verify=minispec.RULES[rule],
            )  # fmt: skip
            return tuple(x for r in rounds for x in r.tokens)

        assert distance(law_of(text), exact_law(p, (0, 1), 5, stop)) < 1e-12


def test_its_drafter_is_rolled_back():
    p, q = (random_rows(seed, 4) for seed in (1, 2))
    draft = minispec.AdaptiveK(minispec.ModelDraft(Toy(q, 4)), V, 0.01)
    rounds = list(
        minispec.generate(
            Toy(p, 4), (0, 1), draft, 8, max_new_tokens=40, temperature=1.0,
            randomness=minispec.Randomness(1),
        )
    )  # fmt: skip
    assert any(r.accepted < len(r.proposals) - 1 for r in rounds)
    assert all(r.cached[1] <= r.cached[0] for r in rounds)


def test_only_the_drafter_that_proposed_learns():
    class Sometimes(Guess):
        def propose(self, tokens, K, law, randomness):
            return super().propose(tokens, K * (len(tokens) % 3 == 0), law, randomness)

    right = minispec.AdaptiveK(Sometimes(lambda at: 1.0), V, 0.05)
    wrong = minispec.AdaptiveK(Guess(lambda at: 0.0), V, 0.05)
    list(minispec.generate(Known(), [0], minispec.Chain([right, wrong]), 8, max_new_tokens=90))
    assert right.reached.sum() == right.accepted.sum() > 1
    assert wrong.reached.sum() > 1 and wrong.accepted.sum() == 0


def test_costs_are_timed_on_the_pair_itself(monkeypatch):
    """A clock that advances one second a row of the target, a tenth a proposal."""
    clock = [0.0]
    monkeypatch.setattr(minispec.time, "perf_counter", lambda: clock[0])

    class Slow(Toy):
        def __call__(self, tokens, cache, rows):
            clock[0] += rows
            return super().__call__(tokens, cache, rows)

    class Draft(Guess):
        def propose(self, tokens, K, law, randomness):
            clock[0] += 0.1 * K
            return super().propose(tokens, K, law, randomness)

    target, draft = Slow(random_rows(1, 4), 4), Draft(lambda at: 0.5)
    for prompt in [2], [1, 2, 3] * 6:
        v, c = minispec.measured_costs(target, draft, prompt)
        assert v == list(range(1, 10)) and c == pytest.approx(0.1)
