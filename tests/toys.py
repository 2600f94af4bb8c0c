"""Every outcome of a sampler, and toy models to point it at: the tools of the exact tests.

`outcomes` runs a function once for every path that chance can take through it, so the law of its
result is computed, not estimated. All it asks is that the function draws through `accept` and
`categorical` of the object it is handed, as minispec does. Point it at a sampler of your own:

>>> p, q = [0.6, 0.3, 0.1], [0.1, 0.2, 0.7]
>>> def one_token(randomness, correction):
...     x = randomness.categorical(q)
...     return x if randomness.accept(p[x], q[x]) else randomness.categorical(correction)

From the residual max(0, p - q) / sum the output has law p; from p itself it has not:

>>> for correction in [5 / 6, 1 / 6, 0], p:
...     law = law_of(lambda randomness: one_token(randomness, correction))
...     print([round(law[x], 9) for x in range(3)])
[0.6, 0.3, 0.1]
[0.46, 0.38, 0.16]

A toy model is a function from the whole prefix to a distribution. Rows that did not depend on all
of the prefix would hide shifted rows, leaking masks and holes in a cache.
"""

import functools
from collections import defaultdict

import numpy as np

LONGEST_PATH = 1000  # choices; a sampler that makes more has lost its end


class Script:
    """Chance that follows a script: stands in for minispec.Randomness.

    The first choices are those of `script`; after its end, each choice takes the first outcome of
    nonzero probability and notes the others in `untried`, as scripts that lead to them.
    """

    def __init__(self, script):
        self.script, self.made, self.untried, self.probability = script, [], [], 1.0

    def accept(self, a, b):
        chance = a / max(a, b) if b > 0 else 0.0  # min(1, a / b), without its overflow
        return self.choose([1 - chance, chance]) == 1

    def categorical(self, distribution):
        return self.choose(distribution)

    def choose(self, distribution):
        if len(self.made) == LONGEST_PATH:
            raise AssertionError(f"more than {LONGEST_PATH} choices on one path: does it end?")
        possible = [i for i, probability in enumerate(distribution) if probability > 0]
        if len(self.made) < len(self.script):
            choice = self.script[len(self.made)]
        else:
            choice = possible[0]
            self.untried += [[*self.made, other] for other in possible[1:]]
        self.made.append(choice)
        self.probability *= float(distribution[choice])
        return choice


def outcomes(function):
    """Yields (probability, function(randomness)) for every path of nonzero probability."""
    scripts = [[]]
    while scripts:
        randomness = Script(scripts.pop())
        result = function(randomness)
        scripts += randomness.untried
        yield randomness.probability, result


def law_of(function):  # -> {result: probability}
    """The law of function(randomness), which must return something hashable.

    >>> law = law_of(lambda chance: chance.categorical([0.5, 0.5]) + chance.accept(1, 4))
    >>> [law[total] for total in (0, 1, 2)]
    [0.375, 0.5, 0.125]
    """
    law = defaultdict(float)
    for probability, result in outcomes(function):
        law[result] += probability
    return law


def distance(law, other):
    """The largest difference between two laws {result: probability}, over all results."""
    return max(abs(law.get(x, 0.0) - other.get(x, 0.0)) for x in {*law, *other})


# --- toy models -------------------------------------------------------------------------------


class ToyCache:
    """The tokens that were fed, in the place of their keys and values."""

    def __init__(self, capacity):
        self.capacity, self.tokens = capacity, []

    @property
    def length(self):
        return len(self.tokens)

    def truncate(self, length):
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} tokens to {length}")
        del self.tokens[length:]


class Toy:
    """A language model given by its distributions: `rows` maps a prefix (a tuple) to p [V].

    It is called, and refuses, as model.Model does. subtle: its rows come from the tokens in the
    cache, not from the `tokens` it is called with. So a stale entry, a hole or a wrong rollback
    changes the output, as it would with keys and values.
    """

    def __init__(self, rows, vocab, context=64):
        self.rows, self.vocab, self.context = rows, vocab, context

    def new_cache(self, capacity):
        self.cache = ToyCache(capacity)  # the newest, for tests that look into it
        return self.cache

    def __call__(self, tokens, cache, rows):  # -> log p [rows, V]
        new, limit = tokens[cache.length :], min(cache.capacity, self.context)
        if not 1 <= rows <= len(new) or len(tokens) > limit:
            raise ValueError(f"{rows} rows, {len(new)} new of {len(tokens)} tokens, limit {limit}")
        if not all(0 <= x < self.vocab for x in new):  # an embedding has no row for it
            raise IndexError(f"a token outside 0..{self.vocab - 1} was fed: {new}")
        cache.tokens += new
        ends = range(cache.length - rows + 1, cache.length + 1)
        with np.errstate(divide="ignore"):
            return np.log([self.rows(tuple(cache.tokens[:end])) for end in ends])


def random_rows(seed, vocab, zeros=False):
    """A toy language: another distribution [V] for every prefix, some tokens at 0 if `zeros`.

    >>> p = random_rows(seed=1, vocab=3)
    >>> p((0,)).round(2).tolist(), p((0, 0)).round(2).tolist()
    ([0.19, 0.22, 0.59], [0.65, 0.18, 0.17])
    """

    @functools.cache
    def rows(prefix):
        # subtle: the length is part of the seed, for NumPy takes [1, 0] and [1, 0, 0] as the same.
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        p = rng.dirichlet(np.ones(vocab))
        if zeros:
            p[rng.permutation(vocab)[: rng.integers(vocab)]] = 0.0  # at least one stays
        return p / p.sum()

    return rows


def same_rows(p):
    """The toy language that says `p` whatever came before: for worked examples by hand."""
    return lambda prefix: np.array(p)


def exact_law(rows, prompt, N, stop=()):  # -> {tokens: probability}
    """The specification: N tokens, each drawn from p given all before it, up to a stop token.

    P(x_1 ... x_N) = product over i of p(x_i | prompt, x_1 ... x_(i-1))

    >>> exact_law(same_rows([0.25, 0.75]), (0,), N=2, stop={0})
    {(0,): 0.25, (1, 0): 0.1875, (1, 1): 0.5625}
    """
    law = {(): 1.0}
    for _ in range(N):
        longer = {}
        for text, probability in law.items():
            if text and text[-1] in stop:
                longer[text] = probability
                continue
            for x, p in enumerate(rows((*prompt, *text))):
                if p > 0:
                    longer[(*text, x)] = probability * float(p)
        law = longer
    return law
