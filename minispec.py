"""Speculative decoding, exactly: a draft proposes K tokens, the target checks them in one pass.

Words and letters:
    p, q     target and draft distribution. (Leviathan et al. name them so; Chen et al. and several
             codebases swap the two.) In model.py q is an attention head, here never.
    K        proposals a round (gamma in Leviathan et al.).
    n        accepted proposals of a round.
    alpha    probability that a proposal is accepted.
    c, v(T)  time of one draft step, and of a target pass over T rows, in units of the target's
             one-row pass.
    round    draft, verification, acceptance, one correction or bonus token, rollback.

Sources: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding"
(2023, arXiv 2211.17192), Algorithm 1; Chen et al., "Accelerating Large Language Model Decoding with
Speculative Sampling" (2023, arXiv 2302.01318), Algorithm 2.

Reading order: `generate` (the round), `token_rule` and the two rules after it, `residual`,
`probabilities`, the drafters; `autoregressive` is what all of it must equal in distribution. The
rest is the command line.

What this file does not do: the forward pass (model.py), batches of sequences, trees of proposals,
beam search, repetition penalties.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

__version__ = "0.1.0"

# ---------------------------------------------------------------- the sampling law


def probabilities(logits, temperature=1.0, top_k=None, top_p=1.0) -> np.ndarray:
    """The distribution that is sampled from, [..., V] float64; for p and for q alike.

    Order: temperature, top-k, renormalise, top-p, renormalise (that of Hugging Face). Temperature 0
    is a one-hot at the largest logit, the first of equals. Top-k keeps exactly k tokens, the lower
    index of equals; None or 0 is off. Top-p keeps a token while the mass before it is < top_p.

    >>> probabilities(np.log([0.5, 0.25, 0.125, 0.125]), top_p=0.75).round(3).tolist()
    [0.667, 0.333, 0.0, 0.0]

    A logit of -inf is a token of probability 0. Raises ValueError for a row with NaN or +inf, or
    with -inf only; for temperature < 0, top_k < 0, top_p outside (0, 1].
    """
    check_sampling(temperature, top_k, top_p)
    z = np.asarray(logits)
    best = z.max(axis=-1, keepdims=True)
    if not np.isfinite(best).all():  # a NaN or +inf anywhere in the row shows in its maximum
        raise ValueError(
            "NaN or infinity in the logits: damaged weights, or an overflow in the pass"
        )
    if temperature == 0:
        p = np.zeros(z.shape)
        np.put_along_axis(p, z.argmax(axis=-1, keepdims=True), 1.0, axis=-1)
        return p
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends losers to exp(-inf)
        p = np.subtract(z, best, dtype=np.float64)
        np.exp(np.divide(p, temperature, out=p), out=p)
    if top_k:
        p = np.apply_along_axis(_keep_top_k, -1, p, top_k)
    p /= p.sum(axis=-1, keepdims=True)
    if top_p < 1:
        p = np.apply_along_axis(_keep_top_p, -1, p, top_p)
        p /= p.sum(axis=-1, keepdims=True)
    return p


def check_sampling(temperature, top_k, top_p):
    """Raises ValueError for a sampling parameter outside its range."""
    if not 0 <= temperature < np.inf:
        raise ValueError(f"temperature must be finite and >= 0, got {temperature}")
    if top_k is not None and top_k < 0:
        raise ValueError(f"top_k must be >= 0 (0 is off), got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")


def _keep_top_k(p, k):  # [V] -> [V]
    if k >= p.size:
        return p
    candidates = np.flatnonzero(p >= np.partition(p, -k)[-k])
    return _keep(p, candidates[np.argsort(-p[candidates], kind="stable")][:k])


def _keep_top_p(p, top_p):  # [V] -> [V]
    # Tokens below (1 - top_p) / V weigh less than 1 - top_p together, so none of them can be kept:
    # leaving them out first makes the sort short.
    candidates = np.flatnonzero(p >= (1 - top_p) / p.size)
    order = candidates[np.argsort(-p[candidates], kind="stable")]
    before = np.concatenate(([0.0], np.cumsum(p[order])[:-1]))
    return _keep(p, order[before < top_p])


def _keep(p, ids):
    kept = np.zeros_like(p)
    kept[ids] = p[ids]
    return kept


def residual(p, q) -> np.ndarray:
    """max(0, p - q) / sum, [V]: what p still needs after accepting min(p, q). p may weigh less
    than 1 in all (the block rule).

    p itself, as a distribution, where p = q to rounding and nothing is left. (Leviathan et al.,
    Algorithm 1: p'(x).)

    >>> residual(np.array([0.6, 0.3, 0.1]), np.array([0.1, 0.2, 0.7])).round(3).tolist()
    [0.833, 0.167, 0.0]
    """
    r = np.maximum(p - q, 0)
    total = r.sum()
    return r / total if total > 0 else p / p.sum()


class Randomness:
    """The only source of chance: a coin and a draw, around one np.random.Generator.

    Tests replace it by an object that enumerates every outcome; subclass it to watch the coins.
    """

    def __init__(self, seed: int | None = None):
        if seed is not None and seed < 0:
            raise ValueError(f"the seed must be >= 0, got {seed}")
        self.rng = np.random.default_rng(seed)

    def accept(self, a: float, b: float) -> bool:
        """True with probability min(1, a / b); false when b = 0.

        subtle: no division, and strictly less, so that a = 0 never passes, not even with u = 0.
        """
        u = self.coin()
        return bool(b > 0 and u * b < a)

    def coin(self) -> float:
        """Uniform in [0, 1), for `accept`."""
        return self.rng.random()

    def categorical(self, distribution) -> int:
        """An index with probability distribution[i]; never one of probability 0."""
        likeliest = int(np.argmax(distribution))
        if distribution[likeliest] == 1:  # at temperature 0: no need to add up a vocabulary
            return likeliest
        cumulative = np.cumsum(distribution)
        u = self.rng.random() * cumulative[-1]
        return int(np.searchsorted(cumulative, u, side="right"))


# ---------------------------------------------------------------- three verification rules

# Each takes K proposals, p [K+1, V] and q [K, V], and returns n, how many are accepted, and the
# token after them. All are exact for any q that the proposals were drawn from.


def token_rule(proposals, p, q, randomness) -> tuple[int, int]:
    """Accept each x_i with probability min(1, p_i(x_i) / q_i(x_i)), up to the first that fails.

    The token after them is drawn from the residual where a proposal failed, else it is the bonus,
    drawn from p_K. Exact, since for every x the two ways to emit it add up to p(x):
        q(x) min(1, p(x)/q(x)) + (1 - sum min(p, q)) residual(x) = min(p, q)(x) + max(0, p - q)(x).
    (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2.)
    """
    for i, x in enumerate(proposals):
        if not randomness.accept(p[i][x], q[i][x]):
            return i, randomness.categorical(residual(p[i], q[i]))
    return len(proposals), randomness.categorical(p[-1])


def block_rule(proposals, p, q, randomness) -> tuple[int, int]:
    """Judge prefixes, not tokens: of those whose coin holds, the longest is accepted.

    w_i = min(1, w_(i-1) p(x_i) / q(x_i)) is how much of the target's mass a prefix may carry on: a
    token that p likes better than q makes up for one before it that q liked better. On average
    never fewer are accepted than by `token_rule`, as many at K = 1. subtle: all coins are tossed;
    to stop at the first that fails would not be exact.
    (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444.)
    """
    n, weight, w, K = 0, 1.0, 1.0, len(proposals)
    for i, x in enumerate(proposals, 1):
        w = min(1.0, w * p[i - 1][x] / q[i - 1][x])
        left = np.maximum(w * p[i] - q[i], 0).sum() if i < K else w
        if randomness.accept(left, left + 1 - w):
            n, weight = i, w
    if n == K:
        return n, randomness.categorical(p[K])
    return n, randomness.categorical(residual(weight * p[n], q[n]))


def match_rule(proposals, p, q, randomness) -> tuple[int, int]:
    """Draw from p as in plain decoding; a proposal is accepted when it is what was drawn.

    So each is accepted with probability sum p q, at most the token rule's sum min(p, q), and as
    often where q is a point mass: prompt lookup, temperature 0. (The rule of llama.cpp and mlx-lm.)
    """
    for n, x in enumerate([*proposals, None]):  # None: the bonus, which matches nothing
        drawn = randomness.categorical(p[n])
        if drawn != x:
            break
    return n, drawn


RULES = {"token": token_rule, "block": block_rule, "match": match_rule}

# ---------------------------------------------------------------- drafters


class Drafter:
    """Proposes tokens. This base class never does, which makes `generate` plain decoding."""

    name = "none"
    cached = 0  # tokens in the drafter's own cache, for --trace

    def start(self, vocab: int, capacity: int, seen=None):
        """A new sequence of up to `capacity` tokens, with a target of `vocab` ids.

        seen: the target's cache, of which a drafter may read what it holds of the tokens so far.
        """

    def propose(self, tokens, K, law, randomness) -> tuple[list[int], Sequence[np.ndarray]]:
        """Up to K proposals after `tokens`, and for each the q [V] it was drawn from.

        How many must be settled before the first is drawn: to drop a proposal because its own q is
        low is not lossless. `law` maps logits [V] to the distribution, filters included.
        """
        return [], []

    def keep(self, length: int):
        """After a round: of the tokens seen so far, only the first `length` still stand."""


class ModelDraft(Drafter):
    """A smaller model of the same vocabulary, sampled by the same law as the target."""

    def __init__(self, model, name: str = "model"):
        self.model, self.name = model, name

    def start(self, vocab, capacity, seen=None):
        self.vocab = vocab
        self.cache = self.model.new_cache(min(capacity, self.model.context))

    def propose(self, tokens, K, law, randomness):
        proposals, q = [], []
        # A padded target can emit an id past a narrower draft's last: it reads its own last one.
        known = [min(x, self.model.vocab - 1) for x in tokens]
        # The last proposal is never fed, so it may lie one past the context; further on: none.
        K = min(K, self.model.context - len(tokens) + 1)
        for _ in range(K):
            logits = self.model(known + proposals, self.cache, rows=1)[0]
            q.append(law(fit_width(logits, self.vocab)))
            proposals.append(randomness.categorical(q[-1]))
        return proposals, q

    def keep(self, length):
        # After full acceptance the last proposal was never fed: the cache is one shorter.
        self.cache.truncate(min(length, self.cache.length))

    @property
    def cached(self):
        return self.cache.length


class TranslatedDraft(ModelDraft):
    """A model with another tokenizer: it proposes only tokens that both vocabularies have, and
    reads the others spelled in its own. (Timor et al. 2025, token-level intersection.)

    shared  {target's id: the model's id of the same bytes}
    spell   target's id -> the model's ids that stand for it
    """

    def __init__(self, model, shared: dict[int, int], spell: Callable, name: str = "translated"):
        super().__init__(model, name)
        self.shared, self.spell = shared, spell

    def start(self, vocab, capacity, seen=None):
        super().start(vocab, 2 * capacity, seen)  # text that takes even more is not drafted for
        self.ends = [0]  # [i] = the model's tokens in the target's first i
        # subtle: a tokenizer may name ids that its model has no row for.
        pairs = [(x, y) for x, y in self.shared.items() if x < vocab and y < self.model.vocab]
        self.ours, self.theirs = (list(ids) for ids in zip(*pairs))

    def propose(self, tokens, K, law, randomness):
        read = [[y for y in self.spell(x) if y < self.model.vocab] for x in tokens]
        self.ends = [0, *itertools.accumulate(map(len, read))]
        known = list(itertools.chain.from_iterable(read))
        K = min(K, self.cache.capacity - len(known) + 1) if known else 0
        # subtle: a token that cannot be spelled adds nothing, and a pass must have one to read.
        self.cache.truncate(min(self.cache.length, max(0, len(known) - 1)))
        proposals, q = [], []
        for _ in range(K):
            logits = np.full(self.vocab, -np.inf)
            logits[self.ours] = self.model(known, self.cache, rows=1)[0][self.theirs]
            q.append(law(logits))  # subtle: filtered after the restriction, so that q is a law
            proposals.append(randomness.categorical(q[-1]))
            known.append(self.shared[proposals[-1]])
            self.ends.append(len(known))
        return proposals, q

    def keep(self, length):
        super().keep(self.ends[min(length, len(self.ends) - 1)])


class StateDraft(ModelDraft):
    """A small model that also reads the target's states of the verified tokens, and while drafting
    its own guesses of them. (Li et al. 2024, "EAGLE".)"""

    def start(self, vocab, capacity, seen=None):
        super().start(vocab, capacity, seen)
        self.seen = seen

    def propose(self, tokens, K, law, randomness):
        verified = len(tokens) - 1  # the last token's state is what the coming pass computes
        if self.seen.length < verified or verified > self.cache.capacity:
            return [], []  # before the first pass, or past the draft's context
        new = slice(self.cache.known, verified)
        self.cache.states[new, :] = self.seen.states[new, :]
        self.cache.known = verified
        return super().propose(tokens, K, law, randomness)

    def keep(self, length):
        # What was fed after those tokens rests on guesses: it is fed again, on the true states.
        super().keep(min(length, self.cache.known + 1))


class EarlyExit(ModelDraft):
    """The target's own first layers, then its norm and head: no weights and no cache of its own.

    Keys and values of those layers are the target's, so no token is read twice; those of the
    proposals go where the verification will write the same again. It does start from the first
    layer: its rows go through the weights together, so the proposals' would be saved for nothing.
    (Elhoushi et al. 2024, "LayerSkip", arXiv 2404.16710, without its training.)
    """

    def start(self, vocab, capacity, seen=None):
        self.vocab, self.seen = vocab, seen
        self.cache = self.model.borrow_cache(seen)

    def propose(self, tokens, K, law, randomness):
        if self.seen.length < len(tokens) - 1:
            return [], []  # before the first pass
        self.cache.length = self.seen.length
        return super().propose(tokens, K, law, randomness)


class Chain(Drafter):
    """The first of several drafters that has a proposal makes the round's."""

    def __init__(self, drafters: Sequence[Drafter]):
        self.drafters, self.name = drafters, ",".join(d.name for d in drafters)

    def start(self, vocab, capacity, seen=None):
        for d in self.drafters:
            d.start(vocab, capacity, seen)

    def propose(self, tokens, K, law, randomness):
        each = (d.propose(tokens, K, law, randomness) for d in self.drafters)
        return next((found for found in each if found[0]), ([], []))

    def keep(self, length):
        for d in self.drafters:
            d.keep(length)

    @property
    def cached(self):
        return max(d.cached for d in self.drafters)


class AdaptiveK(Drafter):
    """Gives another drafter, each round, the K that yields most tokens for its time; 0 is one too.

    tokens(K) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_K,    time(K) = K c + v(K+1)

    a_i, the chance of proposal i after those before it were accepted, is counted as the text goes
    on, the latest rounds most. Where K = 0 is best, a probe of one proposal is made at the first
    chance, then once it costs no more than PROBE of the time since the last; none where even
    perfect acceptance would not pay.
    K follows from earlier rounds alone, before a proposal is drawn, so the law is the target's.

    v    times of target passes over 1, 2, ... rows, as many as the largest K, and one more
    c    time of a proposal, in the same unit (`measured_costs` gives both)
    """

    PRIOR, WEIGHT, MEMORY, PROBE = 0.6, 2.0, 0.95, 0.02

    def __init__(self, inner: Drafter, v: Sequence[float], c: float):
        self.inner, self.v, self.c, self.name = inner, v, c, inner.name

    def start(self, vocab, capacity, seen=None):
        self.inner.start(vocab, capacity, seen)
        self.reached, self.accepted = np.zeros((2, len(self.v) - 1))  # counts by position
        self.proposed, self.idle = 0, np.inf  # proposals of this round; time since there were any

    def propose(self, tokens, K, law, randomness):
        self.length = len(tokens)
        proposals, q = self.inner.propose(tokens, min(K, self.best_K()), law, randomness)
        self.proposed = len(proposals)
        self.idle = 0.0 if proposals else self.idle + self.v[0]
        return proposals, q

    def keep(self, length):
        self.inner.keep(length)
        if self.proposed:  # this round's proposals were of this drafter
            n = min(self.proposed, length - self.length)
            self.reached, self.accepted = self.MEMORY * self.reached, self.MEMORY * self.accepted
            self.reached[: min(n + 1, self.proposed)] += 1
            self.accepted[:n] += 1
        self.proposed = 0

    def best_K(self) -> int:
        gains = self.gains(self.alpha())
        price = (self.c + self.v[1]) / self.v[0] - 1
        worth = np.max(self.gains(np.ones(len(self.v) - 1))) > gains[0]
        if np.argmax(gains) == 0 and worth and price * self.v[0] <= self.PROBE * self.idle:
            return 1
        return int(np.argmax(gains))

    def gains(self, alpha) -> np.ndarray:  # [largest K] -> tokens over time of K = 0, 1, ...
        tokens = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(alpha))])
        return tokens / (self.c * np.arange(len(self.v)) + self.v)

    def alpha(self) -> np.ndarray:  # [largest K]
        # A position that was seldom reached is taken to be like all of them together.
        w = self.WEIGHT
        of_all = (self.accepted.sum() + w * self.PRIOR) / (self.reached.sum() + w)
        return (self.accepted + w * of_all) / (self.reached + w)

    @property
    def cached(self):
        return self.inner.cached


def fit_width(logits, vocab):  # [V of the draft] -> [V of the target]
    """Logits cut, or padded with -inf (q = 0), to the target's width: vocabularies that agree on
    every token may still be padded to different sizes.

    >>> fit_width(np.array([1.0, 2.0]), 3).tolist()
    [1.0, 2.0, -inf]
    """
    missing = max(0, vocab - len(logits))
    return (
        np.concatenate([logits[:vocab], np.full(missing, -np.inf)]) if missing else logits[:vocab]
    )


class PromptLookup(Drafter):
    """The tokens that followed an earlier occurrence of the current n-gram; q is a point mass.

    The longest suffix of `longest` to `shortest` tokens that occurred before decides; of several
    occurrences the last, or with `frequent` the last of those with the most frequent next token. A
    copy that reaches the end goes on with what it just proposed. What was emitted is indexed as it
    comes, so a proposal costs no search. (Saxena 2023, "Prompt Lookup Decoding".)
    """

    name = "ngram"

    def __init__(self, longest: int = 3, shortest: int = 2, frequent: bool = False):
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams of {shortest} to {longest} tokens: 1 <= shortest <= longest")
        self.sizes, self.frequent = range(longest, shortest - 1, -1), frequent

    def start(self, vocab, capacity, seen=None):
        self.vocab = vocab
        self.follower: dict[tuple, int] = {}  # n-gram -> position of the token after it
        self.counts: dict[tuple, int] = {}  # n-gram and the token after it -> occurrences
        self.indexed = 0

    def propose(self, tokens, K, law, randomness):
        for end in range(self.indexed, len(tokens)):
            for n in self.sizes:
                if n <= end:
                    self.note(tuple(tokens[end - n : end]), tokens[end], end)
        self.indexed = len(tokens)
        found = (self.follower.get(tuple(tokens[-n:])) for n in self.sizes if n <= len(tokens))
        at = next((end for end in found if end is not None), None)
        if at is None:
            return [], []
        copy = list(tokens)
        for i in range(K):
            copy.append(copy[at + i])
        proposals = copy[len(tokens) :]
        return proposals, [point_mass(x, self.vocab) for x in proposals]

    def note(self, ngram, x, end):
        if self.frequent:
            self.counts[ngram, x] = self.counts.get((ngram, x), 0) + 1
            if ngram in self.follower and self.counts[ngram, x] < self.counts[ngram, None]:
                return
            self.counts[ngram, None] = self.counts[ngram, x]
        self.follower[ngram] = end


def point_mass(x: int, vocab: int) -> np.ndarray:  # -> [V]
    q = np.zeros(vocab)
    q[x] = 1.0
    return q


# ---------------------------------------------------------------- the loop


@dataclass(frozen=True)
class Round:
    """What one round did. `tokens` = accepted proposals, then one token from the residual (fewer
    accepted than proposed) or the bonus from p_K; a stop token may cut this short."""

    tokens: list[int]  # emitted, in order
    accepted: int  # how many of `tokens` are proposals
    proposals: list[int]
    p: list[float]  # p_i(x_i) of each proposal
    q: list[float]  # q_i(x_i)
    cached: tuple[int, int]  # tokens in the target's and the draft's cache after rollback
    ended: str | None  # "stop", "length", "context"; None: it goes on


def generate(
    target, prompt: Sequence[int], draft: Drafter | None = None, K: int = 4, *,
    max_new_tokens: int = 128, temperature: float = 0.0, top_k: int | None = None,
    top_p: float = 1.0, stop: Sequence[int] = (), randomness: Randomness | None = None,
    verify: Callable = token_rule,
) -> Iterator[Round]:  # fmt: skip
    """Speculative decoding: rounds whose tokens, joined, have exactly the target's distribution.

    target      called as target(tokens, cache, rows) -> logits [rows, V]; has new_cache(capacity),
                vocab and context (model.Model, or anything that does the same)
    prompt      token ids, at least one
    draft       None is plain decoding
    stop        ids that end the text; the stop token is emitted, nothing after it is
    randomness  Randomness(seed) to repeat a run

    Raises ValueError, at the first round, for an argument outside its range.
    """
    law = sampling_law(temperature, top_k, top_p)
    check_request(target, prompt, K, max_new_tokens)
    draft, randomness = draft or Drafter(), randomness or Randomness()
    tokens, end = list(prompt), min(len(prompt) + max_new_tokens, target.context)
    cache, ended = target.new_cache(end), None
    draft.start(target.vocab, end, seen=cache)
    while len(tokens) < end and ended is None:
        # Draft: K proposals x_i ~ q_i; a round emits up to K + 1 tokens, so K shrinks near the end.
        proposals, q = draft.propose(tokens, min(K, end - len(tokens) - 1), law, randomness)

        # Verify: one pass. Row i is p_i, the law of the token after tokens + proposals[:i].
        p = law(target(tokens + proposals, cache, rows=len(proposals) + 1))

        # Accept n proposals and correct: one more token, from the residual or the bonus.
        n, last = verify(proposals, p, q, randomness)
        emitted = up_to_stop([*proposals[:n], last], stop)
        tokens += emitted

        # Roll back: both caches end before the last token, with which the next pass begins.
        cache.truncate(len(tokens) - 1)
        draft.keep(len(tokens) - 1)

        if emitted[-1] in stop:
            ended = "stop"
        elif len(tokens) == end:
            ended = "length" if end - len(prompt) == max_new_tokens else "context"
        yield Round(
            tokens=emitted, accepted=min(n, len(emitted)), proposals=proposals,
            p=chosen(p, proposals), q=chosen(q, proposals),
            cached=(cache.length, draft.cached), ended=ended,
        )  # fmt: skip


def autoregressive(
    target, prompt: Sequence[int], *, max_new_tokens: int = 128, temperature: float = 0.0,
    top_k: int | None = None, top_p: float = 1.0, stop: Sequence[int] = (),
    randomness: Randomness | None = None,
) -> Iterator[int]:  # fmt: skip
    """Plain decoding, one token a pass: the specification. `generate` has this distribution."""
    law = sampling_law(temperature, top_k, top_p)
    check_request(target, prompt, 0, max_new_tokens)
    randomness = randomness or Randomness()
    tokens, end = list(prompt), min(len(prompt) + max_new_tokens, target.context)
    cache, last = target.new_cache(end), None
    while len(tokens) < end and last not in stop:
        last = randomness.categorical(law(target(tokens, cache, rows=1)[0]))
        tokens.append(last)
        yield last


def sampling_law(temperature, top_k, top_p) -> Callable:
    check_sampling(temperature, top_k, top_p)
    return partial(probabilities, temperature=temperature, top_k=top_k, top_p=top_p)


def check_request(target, prompt, K, max_new_tokens):
    if K < 0:
        raise ValueError(f"K must be >= 0, got {K}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be >= 0, got {max_new_tokens}")
    if len(prompt) == 0:
        raise ValueError("the prompt is empty: there must be at least one token to continue")
    if len(prompt) >= target.context:
        raise ValueError(f"the prompt's {len(prompt)} tokens fill the context of {target.context}")
    if not all(0 <= x < target.vocab for x in prompt):
        raise ValueError(f"the prompt holds a token id outside 0..{target.vocab - 1}")


def up_to_stop(tokens: list[int], stop: Sequence[int]) -> list[int]:
    """The tokens up to and including the first stop token.

    >>> up_to_stop([5, 6, 0, 7], stop=[0])
    [5, 6, 0]
    """
    first = next((i for i, x in enumerate(tokens) if x in stop), len(tokens))
    return tokens[: first + 1]


def chosen(rows, ids) -> list[float]:
    return [float(row[x]) for row, x in zip(rows, ids)]


# ---------------------------------------------------------------- text


class TextStream:
    """Token ids in, text out as soon as it is whole.

    A character of several bytes can span tokens, and a token's text can depend on the one before
    it (a leading space). So a window is decoded, not a token: the ids of the last piece shown, and
    those after it; nothing is shown while the text ends in an incomplete character.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self.decode, self.ids, self.start, self.shown = decode, [], 0, 0

    def push(self, x: int) -> str:
        """The text that token x completes, often that of x alone, "" while incomplete."""
        self.ids.append(x)
        text = self._pending()
        if not text or text.endswith("\ufffd"):
            return ""
        self.start, self.shown = self.shown, len(self.ids)
        return text

    def flush(self) -> str:
        """What is left at the end of a text that stops inside a character."""
        text, self.shown = self._pending(), len(self.ids)
        return text

    def _pending(self):
        before = self.decode(self.ids[self.start : self.shown])
        return self.decode(self.ids[self.start :])[len(before) :]


# ---------------------------------------------------------------- the command line


class Stopwatch:
    """Stands in for a target or a drafter; adds up the seconds of its passes or proposals."""

    def __init__(self, inner):
        self.inner, self.seconds, self.calls = inner, 0.0, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, *args, **kwargs):
        return self._timed(self.inner, *args, **kwargs)

    def propose(self, *args, **kwargs):
        return self._timed(self.inner.propose, *args, **kwargs)

    def _timed(self, function, *args, **kwargs):
        started = time.perf_counter()
        result = function(*args, **kwargs)
        self.seconds, self.calls = self.seconds + time.perf_counter() - started, self.calls + 1
        return result


@dataclass
class Answer:
    """The rounds of one generation, why it ended, and where its seconds went."""

    rounds: list[Round] = field(default_factory=list)
    ended: str = "length"
    seconds: float = 0.0  # all of it: prefill, rounds, and showing the text
    first_round: float = 0.0  # seconds of the round that has the prompt in its pass
    first_draft: float = 0.0  # of which drafting, and the target's pass
    first_verification: float = 0.0
    draft: float = 0.0
    verification: float = 0.0
    sampling: float = 0.0
    target_passes: int = 0

    @property
    def tokens(self) -> list[int]:
        return [x for r in self.rounds for x in r.tokens]

    def figures(self) -> dict:
        """Counts, rates and seconds, by their names in the JSON output."""
        tokens, proposals = len(self.tokens), sum(len(r.proposals) for r in self.rounds)
        accepted = sum(r.accepted for r in self.rounds)
        return dict(
            tokens=self.tokens, ended=self.ended, seconds=self.seconds,
            tokens_per_second=tokens / self.seconds if tokens else 0.0, proposals=proposals,
            acceptance=accepted / proposals if proposals else None,
            tokens_per_round=tokens / len(self.rounds) if tokens else 0.0,
            target_passes=self.target_passes, seconds_first_round=self.first_round,
            seconds_draft=self.draft, seconds_verification=self.verification,
            seconds_sampling=self.sampling,
            seconds_other=self.seconds - self.draft - self.verification - self.sampling,
        )  # fmt: skip

    def __str__(self):
        f = self.figures()
        share = f["acceptance"]
        accepted = "nothing proposed" if share is None else f"{share:.1%} accepted"
        return (
            f"{len(f['tokens'])} tokens, {f['tokens_per_second']:.1f} tokens/s, {accepted}, "
            f"{f['tokens_per_round']:.2f} tokens a round, {f['target_passes']} target passes; "
            f"draft {self.draft:.2f} s, verification {self.verification:.2f} s, "
            f"rest {self.seconds - self.draft - self.verification:.2f} s; ended by {self.ended}"
        )


def run(target, prompt, draft=None, K=4, *, show: Callable = lambda r: None, **options) -> Answer:
    """`generate` to its end under a stopwatch. Ctrl-C ends it and keeps what is there.

    show(round) is called after every round; its time counts as `seconds`, nothing else.
    """
    target, draft, answer = Stopwatch(target), Stopwatch(draft or Drafter()), Answer()
    rounds = generate(target, prompt, draft, K, **options)
    started, inside = time.perf_counter(), 0.0
    try:
        while True:
            before = time.perf_counter()
            try:
                r = next(rounds, None)
            finally:  # an interrupted round took its time too
                inside += time.perf_counter() - before
            if r is None:
                break
            if not answer.rounds:
                answer.first_round = inside
                answer.first_draft, answer.first_verification = draft.seconds, target.seconds
            answer.rounds.append(r)
            answer.ended = r.ended
            show(r)
    except KeyboardInterrupt:
        answer.ended = "interrupted"
    answer.seconds = time.perf_counter() - started
    answer.draft, answer.verification = draft.seconds, target.seconds
    answer.sampling = inside - draft.seconds - target.seconds
    answer.target_passes = target.calls
    return answer


ACCEPTED, CORRECTION, BONUS, PLAIN = "\033[32m", "\033[33m", "\033[36m", "\033[0m"


class Printer:
    """Shows rounds on stdout as they come: text, on a terminal coloured by its origin."""

    def __init__(self, tokenizer):
        self.tokenizer, self.stream = tokenizer, TextStream(tokenizer.decode)
        self.colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        if self.colour:
            names = (ACCEPTED, "accepted"), (CORRECTION, "corrected"), (BONUS, "bonus or plain")
            print(*(f"{c}{name}{PLAIN}" for c, name in names), file=sys.stderr)

    def show(self, r: Round):
        last = CORRECTION if r.accepted < len(r.proposals) else BONUS
        for i, x in enumerate(r.tokens):
            self.write(self.stream.push(x), ACCEPTED if i < r.accepted else last)

    def write(self, text: str, colour: str):
        print(f"{colour}{text}{PLAIN}" if self.colour and text else text, end="", flush=True)

    def end(self):
        self.write(self.stream.flush(), PLAIN)
        print()


class Tracer(Printer):
    """Shows each round as a table instead, with the coins that its verification tossed."""

    def __init__(self, tokenizer, coins: list[float], rule: str = "token"):
        self.tokenizer, self.coins, self.rounds, self.ids = tokenizer, coins, 0, []
        self.corrected_from = "p" if rule == "match" else "the residual"

    def show(self, r: Round):
        self.rounds += 1
        self.ids += r.tokens
        print(f"round {self.rounds}: {r.accepted} of {len(r.proposals)} proposals accepted")
        for i, x in enumerate(r.proposals):
            coin = f"{self.coins[i]:.4f}" if i < len(self.coins) else "-"
            verdict = self.verdict(r, i)
            print(f"  {self.quote(x)} q {r.q[i]:.4f}  p {r.p[i]:.4f}  coin {coin:6}  {verdict}")
        for x in r.tokens[r.accepted :]:
            corrected = r.accepted < len(r.proposals)
            origin = self.corrected_from if corrected else "p, as the bonus"
            print(f"  {self.quote(x)} from {origin}")
        print(f"  rolled back to {r.cached[0]} cached tokens (target), {r.cached[1]} (draft)")
        self.coins.clear()

    def quote(self, x: int) -> str:
        return f"{json.dumps(self.tokenizer.decode([x], special=True), ensure_ascii=False):18}"

    def verdict(self, r: Round, i: int) -> str:
        if i < r.accepted:
            return "accepted"
        if len(r.tokens) == r.accepted:
            return "after the stop"
        if i == r.accepted:
            return "rejected"
        return "dropped" if i < len(self.coins) else "not reached"  # block tosses every coin

    def end(self):
        print(f"\n{self.tokenizer.decode(self.ids)}")


class WatchedRandomness(Randomness):
    """Keeps the coins it tosses, for --trace."""

    def __init__(self, seed: int | None):
        super().__init__(seed)
        self.coins: list[float] = []

    def coin(self):
        self.coins.append(super().coin())
        return self.coins[-1]


def ngram_draft(target, shortest=None, longest=None, frequent=None):
    return PromptLookup(int(longest or 3), int(shortest or 2), bool(frequent))


def int4_draft(target):
    from model import quantize

    return ModelDraft(quantize(target))


def early_draft(target, layers=None):
    from model import first_layers

    return EarlyExit(first_layers(target, int(layers or target.config.layers // 2)))


# Names of drafters that need no files, as patterns -> (target, groups of the pattern) -> drafter.
DRAFTS = {
    r"none": lambda target: Drafter(),
    r"ngram(?::(\d+)-(\d+)(:frequent)?)?": ngram_draft,
    r"int4": int4_draft,
    r"early(?::(\d+))?": early_draft,
}
FORMS = "none, ngram, ngram:2-3, ngram:2-3:frequent, int4, early, early:15"
TRAINED = "ngram,weights/draft"  # prompt lookup, and where it finds nothing the trained draft


def load_pair(
    target_name: str | None = None, draft_name: str | None = None, *, backend: str = "numpy",
    device: str | None = None, dtype: str = "float32", quantized: bool = False,
):  # fmt: skip
    """Names as the command line has them -> target model, its tokenizer, drafter.

    target: a checkpoint folder or a hub id; None is the default one, fetched when it is not there.
    draft: one of FORMS, or a folder or id with the target's vocabulary; several with commas between
    them are tried in this order, each round. None is TRAINED where it fits the target, else
    "ngram". backend, device, dtype: of model.BACKENDS, DEVICES, DTYPES; no device is the best one
    there. quantized: the target in 4 bits.
    """
    from model import BACKENDS, Tokenizer, load, quantize
    from weights.fetch import resolve

    folder = resolve(target_name)
    target, tokenizer = load(folder, BACKENDS[backend](dtype, device)), Tokenizer(folder)
    if quantized:
        target = quantize(target)
    try:
        return target, tokenizer, load_drafter(draft_name or TRAINED, target, tokenizer)
    except ValueError:
        if target_name is None or draft_name is not None:
            raise
    return target, tokenizer, PromptLookup()


def load_drafter(names: str, target, tokenizer) -> Drafter:
    """A drafter, or a chain of them, for this target, as `load_pair` names them."""
    drafters = [one_drafter(name, target, tokenizer) for name in names.split(",")]
    return drafters[0] if len(drafters) == 1 else Chain(drafters)


def one_drafter(name: str, target, tokenizer) -> Drafter:
    from model import Tokenizer, is_draft, load, load_draft, same_vocabulary, translation
    from weights.fetch import resolve

    for pattern, make in DRAFTS.items():
        if found := re.fullmatch(pattern, name):
            draft = make(target, *found.groups())
            draft.name = name
            return draft
    if name.split(":")[0] in FORMS.split(", "):
        raise ValueError(f"--draft {name}: a folder, a hub id, or one of {FORMS}")
    if is_draft(folder := resolve(name)):
        return StateDraft(load_draft(folder, target), name)
    if same_vocabulary(tokenizer, theirs := Tokenizer(folder)):
        return ModelDraft(load(folder, target.backend), name)
    shared, spell = translation(tokenizer, theirs)
    return TranslatedDraft(load(folder, target.backend), shared, spell, name)


LARGEST_K = 8  # of -K auto


def adaptive(draft: Drafter, target, prompt: Sequence[int]) -> Drafter:
    """The same drafter, or each of a chain, with a K of its own every round."""
    if isinstance(draft, Chain):
        return Chain([adaptive(d, target, prompt) for d in draft.drafters])
    return AdaptiveK(draft, *measured_costs(target, draft, prompt))


def measured_costs(target, draft: Drafter, prompt: Sequence[int], repeats: int = 3):
    """Seconds of target passes over 1 to LARGEST_K + 1 rows [LARGEST_K + 1], and of a proposal.

    Medians, timed after the prompt's last tokens. Another moment gives other times, so with -K auto
    a seed does not repeat a run.
    """
    text = (list(prompt[-256:]) * (LARGEST_K + 2))[: max(len(prompt[-256:]), LARGEST_K + 2)]
    cache = target.new_cache(len(text))
    times = [[] for _ in range(LARGEST_K + 1)]
    for _, rows in itertools.product(range(repeats + 1), range(1, LARGEST_K + 2)):
        cache.truncate(max(0, cache.length - rows))
        times[rows - 1].append(seconds_of(target, text, cache, rows=rows)[0])
    cache.truncate(len(text) - 1)
    draft.start(target.vocab, len(text) + LARGEST_K, seen=cache)
    greedy = sampling_law(0.0, None, 1.0)
    for _ in range(2):  # the second time it has read the prompt
        spent, made = seconds_of(draft.propose, text, LARGEST_K, greedy, Randomness(0))
        draft.keep(len(text) - 1)
    return [statistics.median(t[1:]) for t in times], spent / max(1, len(made[0]))


def seconds_of(function, *args, **options):
    started = time.perf_counter()
    result = function(*args, **options)
    return time.perf_counter() - started, result


def proposals_a_round(text: str) -> int | str:
    return text if text == "auto" else int(text)


def add_backend_options(say: argparse.ArgumentParser):
    from model import BACKENDS, DEVICES, DTYPES

    say.add_argument("--backend", choices=BACKENDS, default="numpy", help="default %(default)s")
    say.add_argument("--device", choices=DEVICES, help="default: the best one of the backend")
    say.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights")


def backend_options(args: argparse.Namespace) -> dict:
    return dict(backend=args.backend, device=args.device, dtype=args.dtype)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    say = Parser(prog="minispec.py", description="Answer a prompt with speculative decoding.")
    say.add_argument("prompt", nargs="?", help='the question; "-" or a pipe reads standard input')
    say.add_argument("--target", metavar="DIR_OR_ID", help="checkpoint folder or hub id")
    say.add_argument(
        "--draft", metavar="DIR_OR_ID|ngram|int4|none",
        help=f"several with commas are tried in turn (default {TRAINED}, if it fits the target)",
    )  # fmt: skip
    say.add_argument(
        "-K", type=proposals_a_round, default=4, metavar="K|auto",
        help="proposals a round (default %(default)s); auto: as many as pay",
    )  # fmt: skip
    say.add_argument("-n", type=int, default=128, help="most tokens to emit (default %(default)s)")
    say.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    say.add_argument("--top-k", type=int, metavar="N")
    say.add_argument("--top-p", type=float, default=1.0, metavar="X")
    say.add_argument("--quantize", choices=["int4"], help="the target in 4 bits a weight")
    add_backend_options(say)
    say.add_argument("--verify", choices=RULES, default="token", help="verification rule")
    say.add_argument("--seed", type=int, help="repeat a run; default: another one each time")
    say.add_argument("--system", metavar="TEXT", help="system message of the chat template")
    say.add_argument("--raw", action="store_true", help="continue the text: no chat template")
    say.add_argument("--trace", action="store_true", help="show every round as a table")
    say.add_argument("--json", metavar="FILE", help="also write text, counts and times there")
    return say.parse_args(argv)


def prompt_ids(args: argparse.Namespace, tokenizer) -> list[int]:
    text = args.prompt
    if text == "-" or (text is None and not sys.stdin.isatty()):
        text = sys.stdin.read()
    text = EXAMPLE if text is None else text
    if not text.strip():
        raise ValueError("the prompt is empty: pass a text, or pipe one in")
    if args.raw:
        return tokenizer.encode(text)
    if not tokenizer.template:
        print("no chat template here: continuing the text, as with --raw", file=sys.stderr)
    return tokenizer.chat(text, args.system)


EXAMPLE = "Explain in two sentences why the sky is blue."


def write_json(file: str | Path, data: dict):
    """Write beside the file, then rename: a reader never meets half of it."""
    file, text = Path(file), json.dumps(data, indent=1) + "\n"
    if written_to(file):
        file.write_text(text)
        return
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text)
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)


def written_to(file: Path) -> bool:
    """True for /dev/stdout, a pipe, a link: these are not replaced."""
    return file.is_symlink() or (file.exists() and not file.is_file())


def check_writable(file: str | None):
    """Raises OSError before the work starts, not after it."""
    if file is None:
        return
    path = Path(file)
    if path.is_dir() or not os.access(path if written_to(path) else path.parent, os.W_OK):
        raise OSError(f"cannot write {file}: no such folder, or no permission")


def answer_prompt(args: argparse.Namespace):
    check_sampling(args.temperature, args.top_k, args.top_p)
    check_writable(args.json)
    quantized = args.quantize == "int4"
    target, tokenizer, draft = load_pair(
        args.target, args.draft, quantized=quantized, **backend_options(args)
    )  # fmt: skip
    prompt = prompt_ids(args, tokenizer)
    K = args.K
    if K == "auto":
        check_request(target, prompt, 0, args.n)
        draft, K = adaptive(draft, target, prompt), LARGEST_K
    randomness = WatchedRandomness(args.seed)
    printer = Tracer(tokenizer, randomness.coins, args.verify) if args.trace else Printer(tokenizer)
    answer = run(
        target, prompt, draft, K, show=printer.show, max_new_tokens=args.n,
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, stop=tokenizer.stop,
        randomness=randomness, verify=RULES[args.verify],
    )  # fmt: skip
    printer.end()
    if args.draft is None and draft.name != TRAINED:
        print("the trained draft does not fit this target: prompt lookup drafted", file=sys.stderr)
    print(answer, file=sys.stderr)
    if args.json:
        backend = target.backend
        about = dict(
            version=__version__, target=args.target or "default", draft=draft.name,
            verify=args.verify, K=args.K, seed=args.seed, backend=backend.name,
            device=str(backend.device), dtype=str(backend.dtype), prompt_tokens=len(prompt),
        )  # fmt: skip
        write_json(args.json, about | {"text": tokenizer.decode(answer.tokens)} | answer.figures())
    return 130 if answer.ended == "interrupted" else 0


def main(argv: Sequence[str] | None = None) -> int:
    return guard("minispec.py", lambda: answer_prompt(parse(argv)))


def guard(name: str, work: Callable) -> int:
    """Exit status of `work`; what a user can cause ends in one line and status 2."""
    for stream, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, stream) is None:  # closed by the shell, as in `minispec >&-`
            setattr(sys, stream, open(os.devnull, mode))
    try:
        try:
            status = work() or 0
        except SystemExit as end:  # --help, or a wrong option
            status = end.code
        sys.stdout.flush()  # here, where a reader that is gone is known
        return status
    except BrokenPipeError:  # the reader of a pipe has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, MemoryError, ImportError) as error:
        why = str(error) or type(error).__name__
        print(f"{name}: {' '.join(why.split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
