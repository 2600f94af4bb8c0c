"""What speculative decoding gains on this machine, and why.

    python bench.py --quick              # one streamed answer, then the tables, within a minute
    python bench.py --plot why.png       # five configurations and a control, in 8 minutes
    python bench.py --full               # every K from 1 to 8 of the float32 drafts, longer answers
    python bench.py --pair TARGET DRAFT  # one configuration: two models of yours
    python bench.py --compare A.json B.json
    python bench.py --verification       # only v(T): BLAS's own way against tiles
    python bench.py --rules              # every rule with every drafter, at three temperatures
    python bench.py --lossless           # samples of every way to draft and verify, tested, an hour

The configurations are those of "Lossless but Not Free" (arXiv 2607.17283), the study below.

What is done, in this order:
    bandwidth    how fast the weights can be read at all: about what bounds a one-row pass
    v(T)         seconds of a target pass over T rows / over one row, at the context in use
    prediction   from v, c and the host's time, each timed alone, and acceptance on calibration
                 prompts; fixed before the first measured run
    measurement  plain and speculative decoding in turn, on other prompts; prefill is left out
    verdict      what decided: the draft's time, the verification's, or acceptance

Letters: K proposals a round, T rows in a pass, c = time of one draft step / of a one-row pass.
Reading order: the cost model, `predict`, `measure`, `verdict`.

What this file does not do: predictions at temperatures above 0, more than one sequence at a time.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import platform
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_info
from tqdm import tqdm

import minispec
from minispec import run
from model import (
    Model,
    Packed,
    Tiles,
    llama_block,
    llama_config,
    load,
    numpy_backend,
    quantize,
    verify_serially,
)  # fmt: skip
from weights.fetch import resolve

PROMPTS = Path(__file__).with_name("prompts.json")
GROUPS = {"chat and code": ("chat", "code", "list"), "copy-heavy": ("summarise", "quote")}
MOST_K = 8  # proposals a round, at most

# ---------------------------------------------------------------- the cost model

# Everything is in units of the target's one-row pass, so plain decoding takes 1 a token.


def expected_tokens(survival: Sequence[float]) -> float:
    """Tokens a round: 1 + the sum of survival, where [i-1] = P(at least i are accepted).

    >>> round(expected_tokens([0.7, 0.5, 0.4]), 2)
    2.6
    """
    return 1 + sum(survival)


def expected_tokens_iid(alpha: float, K: int) -> float:
    """The same if every proposal is accepted with probability alpha, whatever came before. They
    are not independent, so this is shown beside what was counted, not used.

    (1 - alpha^(K+1)) / (1 - alpha). (Leviathan et al. 2023, Eq. (1).)

    >>> round(expected_tokens_iid(0.8, 5), 2), round(expected_tokens_iid(0.9, 10), 2)
    (3.69, 6.86)
    """
    return sum(alpha**i for i in range(K + 1))


def round_cost(K: int, c: float, v, overhead: float = 0.0) -> float:
    """Time of a round with K proposals: K c + v(K+1) + overhead. v: T -> time of a pass.

    (Leviathan et al. 2023, Theorem 3.8, takes v = 1 and no overhead.)

    >>> round_cost(2, 0.1, {3: 1.25})
    1.45
    """
    return K * c + v[K + 1] + overhead


def speedup(tokens: float, cost: float, plain_cost: float = 1.0) -> float:
    """Over plain decoding, whose token costs `plain_cost`: a pass, and the host's time for it.

    >>> round(speedup(1 + 6 * 0.378, 2.03), 2)  # the study at K = 6
    1.61
    """
    return tokens * plain_cost / cost


def break_even_c(tokens: float, K: int, v, overhead: float = 0.0) -> float:
    """The c at which a round of so many tokens gains nothing; below 0: it cannot gain.

    >>> round(break_even_c(2.0, 4, {5: 1.2}), 2)
    0.2
    """
    return (tokens - v[K + 1] - overhead) / K


def break_even_alpha(K: int, c: float, v, overhead: float = 0.0) -> float | None:
    """The alpha (see `expected_tokens_iid`) at which K gains nothing; None: not even alpha = 1.

    >>> round(break_even_alpha(1, 0.1, {2: 1.2}), 2)
    0.3
    """
    cost, low, high = round_cost(K, c, v, overhead), 0.0, 1.0
    if cost > K + 1:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens_iid(middle, K) < cost else (low, middle)
    return high


def best_K(speedups: dict[int, float]) -> int:
    """The K with the largest speedup, the smallest of equals."""
    return max(sorted(speedups), key=speedups.__getitem__)


# ---------------------------------------------------------------- the machine


def machine() -> dict:
    """What the figures depend on, without anything that names the machine."""
    keys = "internal_api", "version", "architecture", "num_threads"
    return dict(
        system=platform.system(), processor=processor(), cores=os.cpu_count(),
        python=platform.python_version(), numpy=np.__version__,
        blas=[{k: b.get(k) for k in keys} for b in threadpool_info()],
    )  # fmt: skip


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def matrices(target) -> list:
    """Every matrix that one pass multiplies with, in the order of use."""
    w = target.weights
    layers = [W for layer in w["layers"] for W in layer.values() if W.ndim == 2]
    return [*layers, w.get("head", w["embed"])]


def stored(W) -> list[np.ndarray]:
    """The arrays that hold a matrix."""
    if isinstance(W, Packed):
        return [array for block in W.blocks for array in block]
    return [W.stack] if isinstance(W, Tiles) else [W]


def bandwidth(target, repeats: int = 9) -> dict:
    """Gigabytes a second: a plain read by one thread per core, and all one-row products.

    The larger of the two bounds one-row decoding from above. The read is one of the larger half of
    the matrices, which together do not fit a cache.
    """
    all_W = matrices(target)
    sizes = [W.nbytes for W in all_W]
    large = [a for W in all_W if W.nbytes >= statistics.median(sizes) for a in stored(W)]
    b = target.backend
    ones = partial(b.xp.ones, dtype=b.dtype, device=b.device)
    rows = {W.shape[1]: ones((1, W.shape[1])) for W in all_W}

    def multiply():
        for W in all_W:
            b.linear(rows[W.shape[1]], W)
        b.synchronize()

    cores = os.cpu_count() or 1
    shares = [large[i::cores] for i in range(cores)]
    rates = {}
    if b.xp is np:
        with ThreadPoolExecutor(cores) as pool:
            read = lambda share: [np.max(W) for W in share]  # noqa: E731
            reads = [time_of(lambda: list(pool.map(read, shares))) for _ in range(repeats)]
        rates["read"] = sum(W.nbytes for W in large) / statistics.median(reads) / 1e9
    with b.during_pass(1):
        products = [time_of(multiply) for _ in range(repeats)]
    rates["products"] = sum(sizes) / statistics.median(products) / 1e9
    return rates | {"bound": max(rates.values()), "bytes": sum(sizes)}


def time_of(function) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


CONTEXT = 200  # tokens in the cache of a timed pass


def pass_seconds(targets, Ts, repeats: int = 7) -> list[dict]:
    """For each target: median seconds of a pass over each of T rows that ends at CONTEXT.

    One untimed round of all kinds first; then all kinds in turn, forth and back, so that a drift
    meets them all and none is always the first. Between targets a pause: BLAS's threads go on
    spinning for a while, on the cores of the next. After it untimed passes, for the processor to
    wake.

    Raises ValueError when a context is too short for so many rows.
    """
    context = min(CONTEXT, *(target.context for target in targets))
    if max(Ts) >= context:
        raise ValueError(f"a context of {context} tokens is too short to time {max(Ts)} rows")
    tokens = [i % targets[0].vocab for i in range(context)]
    caches = [target.new_cache(context) for target in targets]
    for target, cache in zip(targets, caches):
        target(tokens, cache, rows=1)

    def timed(target, cache, T):
        cache.truncate(context - T)
        return timed_pass(target, tokens, cache, T)

    times: list[dict] = [{T: [] for T in Ts} for _ in targets]
    for repeat in range(repeats + 1):
        for target, cache, found in zip(targets, caches, times):
            if len(targets) > 1:
                time.sleep(0.2)
                for _ in range(3):
                    timed(target, cache, 1)
            for T in sorted(Ts, reverse=repeat % 2 == 1):
                spent = timed(target, cache, T)
                if repeat:  # the first is the warm-up
                    found[T].append(spent)
    return [{T: statistics.median(t) for T, t in each.items()} for each in times]


def all_passes(models: dict[str, Model], quick: bool) -> dict[str, dict]:
    """{way: {T: seconds}} for all T up to MOST_K + 1; the slow 4-bit passes have fewer repeats."""
    slow = [way for way in models if way.startswith("int4")]
    fast = [way for way in models if way not in slow]
    found: dict[str, dict] = {}
    for ways, repeats in ((fast, 5 if quick else 7), (slow, 1 if quick else 5)):
        if ways:
            times = pass_seconds([models[way] for way in ways], range(1, MOST_K + 2), repeats)
            found |= dict(zip(ways, times))
    if len(slow) == 2:  # one row is the same work for both
        both = statistics.fmean(found[way][1] for way in slow)
        found |= {way: found[way] | {1: both} for way in slow}
    return found


def ratios(passes: dict[str, dict], way: str) -> dict[int, float]:
    """v(T) of a way."""
    unit = own_unit(passes, way)
    return {T: s / unit for T, s in passes[way].items()}


def own_unit(passes: dict[str, dict], way: str) -> float:
    """Seconds of the fastest one-row pass over the weights that this way goes through."""
    weights = way.split()[0]
    return min(seconds[1] for other, seconds in passes.items() if other.split()[0] == weights)


def timed_pass(target, tokens, cache, rows: int) -> float:
    target.backend.synchronize()
    started = time.perf_counter()
    target(tokens, cache, rows=rows)
    target.backend.synchronize()
    return time.perf_counter() - started


# ---------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Size:
    """How much is measured: "each" is a number of prompts of every kind, None is all of them."""

    Ks: Sequence[int]  # for the trained draft, and for prompt lookup where text is copied
    other_Ks: Sequence[int]  # for the rest; none: the best of the prediction, and `beside`
    tokens: int  # most of an answer
    each: int | None
    few_tokens: int  # the same where passes are slow: in 4 bits
    few_each: int | None
    calibration: dict[str, int | None]  # weights -> each
    beside: int  # neighbours of the best K, on either side


EVERY_K = range(1, MOST_K + 1)
SIZES = {
    "quick": Size((8,), (2, 4), 40, 1, 16, 1, {"float32": 1, "int4": 1}, 0),
    "default": Size((1, 2, 4, 6, 8), (), 48, None, 24, 2, {"float32": None, "int4": 3}, 1),
    "full": Size(EVERY_K, EVERY_K, 128, None, 48, None, {"float32": None, "int4": None}, 1),
}


@dataclass
class Setup:
    """One configuration: what drafts, what verifies, on which prompts, at which K.

    number  its name in the tables
    way     of verification: "float32" (the faster way of this machine), "float32 plain" (BLAS's
            own), "int4 batched", "int4 serial"
    """

    number: str
    way: str
    draft: minispec.Drafter
    group: str
    Ks: Sequence[int]
    tokens: int
    each: int | None
    predictions: dict[int, Prediction] = field(default_factory=dict)  # K -> what it should give

    @property
    def weights(self) -> str:
        return self.way.split()[0]

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from the others of its session."""
        return self.number, self.way

    def settle(self, beside: int):
        """Where no K is asked for: the best of the prediction, and its neighbours."""
        if not self.Ks:
            best = best_K({K: p.speedup for K, p in self.predictions.items()})
            longest = min(MOST_K, self.tokens // 2 - 1)  # else the answer would be two rounds
            near = range(best - beside, best + beside + 1)
            self.Ks = sorted({min(max(K, 1), longest) for K in near})


def five_configurations(drafts: dict, size: Size, quick: bool) -> list[Setup]:
    """The study's, the chain of both drafts, and plain BLAS as a control; in short, four of them.

    drafts: by "trained", "chain", "ngram", "int4". Prompt lookup stands in for a trained draft.
    """
    chat, copy = GROUPS
    trained, chain = drafts.get("trained", drafts["ngram"]), drafts.get("chain", drafts["ngram"])
    most, few = (size.tokens, size.each), (size.few_tokens, size.few_each)
    setups = [
        Setup("1", "float32", trained, chat, size.Ks, *most),
        Setup("1+2", "float32", chain, chat, size.other_Ks, *most),
        Setup("2", "float32", drafts["ngram"], chat, size.other_Ks, *most),
        Setup("2", "float32", drafts["ngram"], copy, size.Ks, *most),
        Setup("1+2", "float32", chain, copy, size.other_Ks, *most),
        Setup("3", "float32", drafts["int4"], chat, (), *few),
        Setup("4", "int4 serial", trained, chat, (), *few),
        Setup("5", "int4 batched", trained, chat, (), *few),
        Setup("C", "float32 plain", trained, chat, (4,), *most),
    ]
    in_short = {("1+2", chat), ("2", copy), ("4", chat), ("5", chat)}
    skipped = {("1+2", copy)} if size is not SIZES["full"] else set()
    if "trained" not in drafts:
        skipped |= {(number, group) for number in ("1", "1+2") for group in GROUPS}
    return [
        s for s in setups
        if (s.number, s.group) not in skipped and (not quick or (s.number, s.group) in in_short)
    ]  # fmt: skip


def sessions_of(setups: Sequence[Setup]) -> list[list[Setup]]:
    """Those with the same plain decoding beside them, the same prompts and as long answers."""
    sessions: dict[tuple, list[Setup]] = {}
    for s in setups:
        same = "int4" if s.weights == "int4" else s.way
        sessions.setdefault((same, s.group, s.tokens, s.each), []).append(s)
    return list(sessions.values())


# ---------------------------------------------------------------- prediction


class Known(NamedTuple):
    """A prompt, its plain greedy continuation, and the target's states [tokens, D] of both."""

    prompt: list[int]
    more: list[int]
    states: np.ndarray


def known_continuation(target, prompt, stop, most_tokens: int, draft=None) -> Known:
    """What the target answers at temperature 0; a draft only makes it faster."""
    caches = []

    class Kept(minispec.Stopwatch):
        def new_cache(self, capacity):
            caches.append(self.inner.new_cache(capacity))
            return caches[-1]

    answer = finished(run(Kept(target), prompt, draft, max_new_tokens=most_tokens, stop=stop))
    return Known(prompt, answer.tokens, caches[0].states)


def finished(answer: minispec.Answer) -> minispec.Answer:
    """Ctrl-C ends a run early and quietly; here it is to end everything."""
    if answer.ended == "interrupted":
        raise KeyboardInterrupt
    return answer


class Replay:
    """A target that already knows its greedy continuation, and whose passes cost nothing.

    Greedy rounds with it are those of the real target, token for token, so the time of a drafter
    and of the host can be had alone. For the drafter's sake a pass drives as much through the
    processor's cache as a real one leaves there.
    """

    def __init__(self, known: Known, target):
        self.tokens, self.states = [*known.prompt, *known.more], known.states
        self.target, self.vocab, self.context = target, target.vocab, target.context
        arrays = [a for W in matrices(target) for a in stored(W)]
        sizes = itertools.accumulate(a.nbytes for a in arrays)
        self.passing = [a for a, total in zip(arrays, sizes) if total < 64e6]

    def new_cache(self, capacity):
        cache = self.target.new_cache(capacity)
        cache.states = self.states
        return cache

    def __call__(self, tokens, cache, rows):
        for array in self.passing:
            self.target.backend.xp.max(array)
        self.target.backend.synchronize()
        cache.length = len(tokens)
        logits = np.zeros((rows, self.vocab), np.float32)
        for i, position in enumerate(range(len(tokens) - rows + 1, len(tokens) + 1)):
            if position < len(self.tokens):  # else: past the last known token, never emitted
                logits[i, self.tokens[position]] = 1.0
        return logits


def rehearse(known: Known, draft, vocab: int) -> list[tuple[int, int]]:
    """After each known token but the last: how many of up to MOST_K proposals there are, and how
    many of them are right. Greedy rounds at every K follow from it.

    An answer that a stop token ended is taken as one that the cap ended: there a real draft
    proposes past the end, so that its last round is a little dearer.
    """
    tokens, start = [*known.prompt, *known.more], len(known.prompt) + 1
    room = [min(MOST_K, len(tokens) - end) for end in range(start, len(tokens))]
    if reads_text_only(draft) and len(tokens) <= draft.model.context:
        # Its proposals are right up to the first wrong one, so one pass over the text shows them.
        model, ids = draft.model, [min(x, draft.model.vocab - 1) for x in tokens]
        logits = model(ids, model.new_cache(len(ids)), rows=len(known.more))[:-1, :vocab]
        right = (np.argmax(logits, axis=-1) == known.more[1:]).tolist()
        return [(n, right_ones(right[i : i + n])) for i, n in enumerate(room)]
    seen, law = SimpleNamespace(states=known.states), minispec.sampling_law(0.0, None, 1.0)
    draft.start(vocab, len(tokens), seen=seen)
    found = []
    for end, n in zip(range(start, len(tokens)), room):
        seen.length = end - 1
        proposals, _ = draft.propose(tokens[:end], n, law, minispec.Randomness(0))
        draft.keep(end - 1)
        right = [x == y for x, y in zip(proposals, tokens[end:])]
        found.append((len(proposals), right_ones(right)))
    return found


def reads_text_only(draft) -> bool:
    """True for a model whose proposals follow from the tokens alone."""
    return type(draft) in (minispec.ModelDraft, minispec.EarlyExit)


def right_ones(right: Sequence[bool]) -> int:
    """How many are true before the first that is not.

    >>> right_ones([True, True, False, True])
    2
    """
    return sum(1 for _ in itertools.takewhile(bool, right))


def rounds_at(K: int, rehearsal: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(proposals, accepted) of every round after the first, if a text is decoded at K.

    >>> rounds_at(2, [(8, 1), (8, 8), (8, 8), (8, 0), (1, 1)])
    [(2, 1), (2, 2)]
    """
    at, rounds = 0, []
    while at < len(rehearsal):
        proposed, right = rehearsal[at]
        k = min(K, proposed, len(rehearsal) - at - 1)  # the last token needs no proposal
        rounds.append((k, min(k, right)))
        at += min(k, right) + 1
    return rounds


class HostTimes(NamedTuple):
    """In units of the target's one-row pass; by K."""

    c: dict[int, float]  # of drafting, a proposal; a state draft's pass over the prompt included
    overhead: dict[int, float]  # of everything else outside the passes, a round
    plain: float  # of the same, a token of plain decoding


def host_times(target, known: Sequence[Known], draft) -> HostTimes:
    """From replays at two K; a round's time is a straight line through them.

    The one-row pass is timed before and after, so that both sides of a ratio are of one moment.
    """

    def unit():
        return pass_seconds([target], (1,), repeats=4)[0][1]

    def replay(K):
        used = draft if K else None
        answers = [
            finished(run(Replay(k, target), k.prompt, used, K, max_new_tokens=len(k.more)))
            for k in known
        ]
        rounds = [r for a in answers for r in a.rounds[1:]]
        drafting = sum(a.draft - a.first_draft for a in answers)
        rest = sum(split(a, 1.0)[2] * (len(a.rounds) - 1) for a in answers)
        proposals = sum(len(r.proposals) for r in rounds)
        if not proposals:  # looking in vain is no proposal's cost
            return np.array([0.0, (rest + drafting) / len(rounds)])
        return np.array([drafting / proposals, rest / len(rounds)])

    low, high, before = 1, 6, unit()
    seconds = replay(low), replay(high), replay(0)
    one_row = statistics.fmean([before, unit()])
    (c_low, rest_low), (c_high, rest_high), (_, plain) = (s / one_row for s in seconds)
    c, rest = {}, {}
    for K in range(1, MOST_K + 1):
        share = (K - low) / (high - low)
        c[K] = float((1 - share) * low * c_low + share * high * c_high) / K
        rest[K] = float((1 - share) * rest_low + share * rest_high)
    return HostTimes(c, rest, float(plain))


@dataclass
class Prediction:
    """What a K should give: medians over the calibration prompts, acceptance over all rounds."""

    speedup: float
    c: float
    overhead: float
    tokens_per_round: float
    acceptance: list[float]


def predict(rehearsals: Sequence[Sequence], K: int, v, times: HostTimes) -> Prediction:
    """The cost model on the rounds that the calibration texts would take at K."""
    c, overhead = times.c[K], times.overhead[K]
    each = [rounds_at(K, rehearsal) for rehearsal in rehearsals]
    tokens = [expected_tokens(survival(rounds, K)) for rounds in each]
    costs = [statistics.fmean(round_cost(k, c, v, overhead) for k, _ in rounds) for rounds in each]
    gains = [speedup(t, cost, v[1] + times.plain) for t, cost in zip(tokens, costs)]
    shares = acceptance([pair for rounds in each for pair in rounds], K)
    return Prediction(
        statistics.median(gains), c, overhead, statistics.median(tokens), shares
    )  # fmt: skip


def survival(rounds: Sequence[tuple[int, int]], K: int) -> list[float]:
    """[i-1]: the share of the rounds, (proposals, accepted) each, with at least i accepted.

    >>> survival([(2, 2), (2, 0), (1, 1), (0, 0)], K=2)
    [0.5, 0.25]
    """
    return [statistics.fmean(n >= i for _, n in rounds) for i in range(1, K + 1)]


def acceptance(rounds: Sequence[tuple[int, int]], K: int) -> list[float]:
    """[i-1]: the same of those rounds only that have at least i proposals; 0 if none has.

    >>> acceptance([(2, 2), (2, 0), (1, 1), (0, 0)], K=2)
    [0.6666666666666666, 0.5]
    """
    reached = ([pair for pair in rounds if pair[0] >= i] for i in range(1, K + 1))
    return [survival(some, i)[-1] if some else 0.0 for i, some in enumerate(reached, 1)]


# ---------------------------------------------------------------- measurement


def decoding_rate(answer: minispec.Answer) -> float:
    """Tokens a second after the first round, whose pass holds the prompt."""
    tokens = len(answer.tokens) - len(answer.rounds[0].tokens)
    return tokens / (answer.seconds - answer.first_round)


PLAIN = 2  # times that each prompt is decoded plainly: at the beginning and at the end


def measure(setups: Sequence[Setup], models: dict, prompt, tick, **options) -> dict | None:
    """One prompt: plain decoding and each setup at each of its K, in turn.

    Returns {"plain": [answers], (key of the setup, K): answer}; None where the plain answer is too
    short to time. All setups have the same weights; plain decoding goes the way of the last one.
    tick(setup, K) is called after each run, K = 0 for plain.
    """

    def answer(setup, K):
        options["randomness"] = minispec.Randomness(seed=0)
        result = run(models[setup.way], prompt, setup.draft if K else None, K, **options)
        tick(setup, K)
        return finished(result)

    results: dict = {"plain": [answer(setups[-1], 0)]}
    Ks, length = sorted({K for s in setups for K in s.Ks}), len(results["plain"][0].tokens)
    if length < 2 * (max(Ks) + 1):
        print(f"a prompt is left out: {length} tokens of answer, K = {max(Ks)}", file=sys.stderr)
        return None
    for K, s in itertools.product(Ks, setups):
        if K in s.Ks:
            results[s.key, K] = answer(s, K)
    results["plain"] += [answer(setups[-1], 0) for _ in range(PLAIN - 1)]
    return results


def measure_all(setups, models, prompts: dict, passes: dict, **options) -> list[list[dict]]:
    """For each setup the results of all its prompts, {kind: [prompt]}; with the time left."""

    def seconds(s: Setup, K: int) -> float:
        expected = s.predictions[K].speedup if K in s.predictions else 1.0
        return s.tokens * passes[s.way][1] / expected

    todo = [(some, by_group(prompts, some[0].each)[some[0].group]) for some in sessions_of(setups)]
    total = sum(
        len(chosen)
        * (PLAIN * seconds(some[-1], 0) + sum(seconds(s, K) for s in some for K in s.Ks))
        for some, chosen in todo
    )
    results = {}
    with progress("measuring", 1.001 * total) as bar:  # a sum in another order may exceed it
        for some, chosen in todo:
            options["max_new_tokens"] = some[0].tokens
            tick = lambda s, K: bar.update(seconds(s, K))  # noqa: E731
            found = [measure(some, models, prompt, tick, **options) for prompt in chosen]
            found = [of_prompt for of_prompt in found if of_prompt]
            if not found:
                raise ValueError(
                    f"every answer of {some[0].group} is too short to time: change the prompts"
                )
            results |= {id(s): found for s in some}
    return [results[id(s)] for s in setups]


def gain(results: dict, key: tuple) -> float | None:
    """Speculative over plain rate; None where the two did not emit equally many tokens."""
    if any(len(results[key].tokens) != len(p.tokens) for p in results["plain"]):
        return None
    return decoding_rate(results[key]) / plain_rate(results)


def plain_rate(results: dict) -> float:
    return statistics.median(decoding_rate(p) for p in results["plain"])


def noise(results: Sequence[dict]) -> float:
    """Twice the standard error of a median speedup, as the clock alone would have it.

    From the repeats of plain decoding: how far answers that are the same stray from their mean. The
    median of n ratios, of one answer to the median of r, has 1.25 sqrt((1 + 1/r) / n) of that.
    """
    strays, freedom, repeats = 0.0, 0, 1
    for r in results:
        rates = [decoding_rate(p) for p in r["plain"]]
        strays += sum((rate / statistics.fmean(rates) - 1) ** 2 for rate in rates)
        freedom, repeats = freedom + len(rates) - 1, len(rates)
    sigma = math.sqrt(strays / freedom) if freedom else 0.0
    return 2 * 1.25 * sigma * math.sqrt((1 + 1 / repeats) / len(results))


def split(answer: minispec.Answer, step: float) -> list[float]:
    """Draft, verification and the rest of a round after the first, in plain steps of `step` s."""
    rounds = max(1, len(answer.rounds) - 1)
    draft = answer.draft - answer.first_draft
    verification = answer.verification - answer.first_verification
    rest = answer.seconds - answer.first_round - draft - verification
    return [part / rounds / step for part in (draft, verification, rest)]


def at_K(results: Sequence[dict], key: tuple, K: int, prediction: Prediction | None, v) -> dict:
    """One row of a table: medians over the prompts, acceptance over all rounds."""
    row = dict(
        K=K, v=v.get(K + 1), c=prediction and prediction.c,
        overhead=prediction and prediction.overhead,
        predicted=prediction and prediction.speedup, measured=None,
    )  # fmt: skip
    if (key, K) not in results[0]:
        return row
    answers = [r[key, K] for r in results]
    rounds = [[(len(r.proposals), r.accepted) for r in a.rounds[1:]] for a in answers]
    gains = [gain(r, (key, K)) for r in results]
    parts = zip(*(split(a, 1 / plain_rate(r)) for a, r in zip(answers, results)))
    shares = acceptance([pair for some in rounds for pair in some], K)
    proposals = statistics.median(statistics.fmean(k for k, _ in some) for some in rounds)
    return row | dict(
        acceptance=shares, rows_per_round=1 + proposals,
        tokens_per_round=statistics.median(expected_tokens(survival(r, K)) for r in rounds),
        tokens_iid=expected_tokens_iid(shares[0], K) if proposals > 0.8 * K else None,
        measured=None if None in gains else statistics.median(gains), by_prompt=gains,
        tokens_per_second=statistics.median(map(decoding_rate, answers)),
        split=dict(zip(("draft", "verification", "rest"), map(statistics.median, parts))),
        identical=sum(a.tokens == r["plain"][0].tokens for a, r in zip(answers, results)),
    )  # fmt: skip


IDEAL = {"int4 serial": "int4 batched", "float32 plain": "float32"}  # the same, in parallel


def configuration(setup: Setup, results: Sequence[dict], passes: dict[str, dict]) -> dict:
    """One table: what was predicted for every K, what was measured, and which K is the best."""
    v, predictions = ratios(passes, setup.way), setup.predictions
    every = sorted({*predictions, *setup.Ks})
    by_k = [at_K(results, setup.key, K, predictions.get(K), v) for K in every]
    best = max((row for row in by_k if row["K"] in setup.Ks), key=lambda row: row["measured"] or 0)
    plain = statistics.median(map(plain_rate, results))
    ideal = passes.get(IDEAL.get(setup.way))
    parallel = ideal[best["K"] + 1] * plain if ideal else 1.0
    return dict(
        number=setup.number, name=setup.group, draft=setup.draft.name, verification=setup.way,
        quantize="int4" if setup.weights == "int4" else None, prompts=len(results),
        tokens=setup.tokens, plain_tokens_per_second=plain, c=best["c"],
        v={str(T): ratio for T, ratio in v.items()}, by_k=by_k, best_k=best["K"],
        speedup=best["measured"], predicted=best["predicted"], noise=noise(results),
        tokens_per_second=best["tokens_per_second"], verdict=verdict(best, parallel),
    )  # fmt: skip


def verdict(row: dict, parallel: float = 1.0) -> str:
    """What a round yields and costs, and what decided, in a sentence.

    parallel: plain steps that a parallel verification of as many rows would take.
    """
    if row["measured"] is None:
        return "no speedup: plain and speculative outputs differ in length"
    draft, verification, rest = row["split"].values()
    low, high = min(row["by_prompt"]), max(row["by_prompt"])
    return (
        f"{row['measured']:.2f}x at K={row['K']} ({low:.2f}x to {high:.2f}x by prompt): "
        f"{row['tokens_per_round']:.2f} tokens a round for {draft + verification + rest:.2f} plain "
        f"steps (draft {draft:.2f}, verification {verification:.2f}, rest {rest:.2f}); "
        f"{cause(row, parallel)}"
    )


def cause(row: dict, parallel: float) -> str:
    """A loss is the draft's or the verification's if it would be none without what that one costs
    too much; of two such, the one that costs more. Everything else is acceptance."""
    K, E, k = row["K"], row["tokens_per_round"], row["rows_per_round"] - 1
    draft, verification, rest = row["split"].values()
    without = {
        "draft": E / (verification + rest),
        "verification": E / (draft + min(verification, parallel) + rest),
    }
    spoilt = [name for name, gain in without.items() if gain >= 1 > row["measured"]]
    worst = max(spoilt, key=without.__getitem__, default="acceptance")
    if worst == "draft":
        even = break_even_c(E, K, {K + 1: verification}, rest)
        perfect = (k + 1) / (draft + verification + rest)
        return (
            f"the draft is not fast enough, {draft / K:.2f} steps a proposal (break-even "
            f"{even:.2f}); a free one would give {without[worst]:.2f}x, perfect acceptance "
            f"{perfect:.2f}x"
        )
    if worst == "verification":
        return (
            f"verification is not parallel: {k + 1:.1f} rows take {verification:.2f} steps; with "
            f"{parallel:.2f} it would be {without[worst]:.2f}x"
        )
    if k < 0.8 * K:
        return f"proposals are few, {k:.1f} a round"
    first, last = (f"{100 * row['acceptance'][i]:.0f} %" for i in (0, K - 1))
    alpha = break_even_alpha(K, draft / K, {K + 1: verification}, rest)
    return (
        f"acceptance decides, {first} at the first" + (K > 1) * f", {last} up to number {K}"
        + ("" if alpha is None else f" (break-even alpha {100 * alpha:.0f} %)")
    )  # fmt: skip


# ---------------------------------------------------------------- verification alone


def synthetic(backend, layers: int = 4):
    """Layers of Llama-3.2-1B's shape with random weights: what a larger model would see."""
    config = llama_config(dict(
        num_hidden_layers=layers, hidden_size=2048, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, intermediate_size=8192, vocab_size=4096, max_position_embeddings=4096,
        tie_word_embeddings=True,
    ))  # fmt: skip
    D, F, rng = 2048, 8192, np.random.default_rng(0)

    def filled(**shapes):
        places = dict(zip(shapes, backend.empty(list(shapes.values()))))
        for W in places.values():
            normal = rng.standard_normal(W.shape, np.float32)
            W[0 : W.shape[0]] = 0.02 * normal if W.ndim == 2 else 1.0
        on = backend.to_device
        return {name: W if isinstance(W, Tiles) else on(W) for name, W in places.items()}

    layer = dict(
        attn_norm=(D,), qkv=(3072, D), o=(D, D), mlp_norm=(D,), gate_up=(2 * F, D), down=(D, F)
    )
    weights = filled(embed=(4096, D), norm=(D,)) | {
        "layers": [filled(**layer) for _ in range(layers)]
    }
    backend.prepare(weights)
    return Model(config, weights, backend, llama_block)


def verification(args: argparse.Namespace):
    """v(T) of the plain and of the tiled way, in turn, for the target and for a larger stack."""
    minispec.check_writable(args.json)
    folder, report = resolve(args.target), dict(version=minispec.__version__, machine=machine())
    makers = {"target": partial(load, folder), "layers of a 1B-parameter model": synthetic}
    for name, make in makers.items():
        plain, tiled = (make(backend=numpy_backend(way=way)) for way in ("plain", "tiles"))
        rates = bandwidth(tiled)
        times = dict(zip(("plain", "tiles"), pass_seconds([plain, tiled], range(1, 18))))
        one_row = min(seconds[1] for seconds in times.values())
        bound = rates["bytes"] / rates["bound"] / 1e6
        prefill = [statistics.median(timed_prefill(t) for _ in range(3)) for t in (plain, tiled)]
        print(
            f"{name}: {rates['bytes'] / 1e6:.0f} MB, at {rates['bound']:.1f} GB/s {bound:.1f} ms; "
            f"fastest one-row pass {1e3 * one_row:.1f} ms\n"
            f"prefill of {min(PREFILL, tiled.context)} tokens: plain {prefill[0]:.2f} s, tiles "
            f"{prefill[1]:.2f} s\n"
            " T   plain ms  v(T)   tiles ms  v(T)"
        )
        for T in times["plain"]:
            cells = (f"{1e3 * t[T]:10.1f} {t[T] / one_row:5.2f}" for t in times.values())
            print(f"{T:2} {' '.join(cells)}")
        report[name] = dict(
            bandwidth=rates, one_row_ms=1e3 * one_row, prefill_s=dict(zip(times, prefill)),
            pass_ms={way: {T: 1e3 * s for T, s in t.items()} for way, t in times.items()},
        )  # fmt: skip
        del plain, tiled
    if args.json:
        minispec.write_json(args.json, rounded(report))


PREFILL = 512  # tokens


def timed_prefill(target) -> float:
    length = min(PREFILL, target.context)
    tokens = [i % target.vocab for i in range(length)]
    return timed_pass(target, tokens, target.new_cache(length), 1)


# ---------------------------------------------------------------- is it lossless?

# Level 4 of the tests, on the real pair: samples of plain decoding and of every way to draft and to
# verify, compared as whole continuations. Seeds and sizes stand here, and there is one run.


class Method(NamedTuple):
    """A way to sample: its name in the table, and what `run` needs for it."""

    name: str
    draft: str
    verify: str = "token"
    K: int | str = 4
    temperature: float = 1.0
    texts: int = 20  # continuations of each prompt


SAMPLED, PERMUTATIONS = 46, 9999  # tokens a text
FEWER = 5  # texts of what is slow or much like another way
PLAINLY = Method("plain decoding", "none", K=0)  # what the others are compared with
AGAIN = Method("plain decoding again", "none", K=0)
OTHER = Method("control: temperature 1.2", "none", K=0, temperature=1.2, texts=FEWER)
NEAR_TIE = 1e-4  # between two logits: rounding may decide


def methods(draft: str | None) -> list[Method]:
    """Each rule with the default draft and each drafter with `token`; or each rule with `draft`."""
    default = draft or minispec.TRAINED
    found = [Method(f"{rule}, {default}", default, rule) for rule in minispec.RULES]
    if draft is None:
        found += [Method(f"token, {name}", name) for name in ("weights/draft", "ngram")]
        found += [Method(f"token, {default}, -K auto", default, K="auto")]
        rest = "ngram:2-3:frequent", "early:15", "int4"
        found += [Method(f"token, {name}", name, texts=FEWER) for name in rest]
    return [*found, AGAIN, OTHER]


def permutation_p(ours, plain, permutations: int = PERMUTATIONS, seed: int = 0) -> float:
    """P(two samples of one law differ at least as much): lists, one per prompt, of [texts, tokens].

    The difference is a sum over prompts and tokens of (share in ours - share in plain)^2 / count.
    Tokens of one text depend on each other, so whole texts change sides, within their prompt.
    """
    rng, observed, permuted = np.random.default_rng(seed), 0.0, np.zeros(permutations)
    for a, b in zip(ours, plain, strict=True):
        texts = [*a, *b]
        ids, where = np.unique(np.concatenate(texts), return_inverse=True)
        counts = np.zeros((len(texts), len(ids)))
        np.add.at(counts, (np.repeat(np.arange(len(texts)), [len(t) for t in texts]), where), 1)
        side = np.repeat([len(b), -len(a)], [len(a), len(b)])  # whole numbers: equal is equal
        sides = rng.permuted(np.tile(side, (permutations, 1)), axis=1)
        weights = 1 / counts.sum(0) / (len(a) * len(b)) ** 2
        observed += (side @ counts) ** 2 @ weights
        permuted += (sides @ counts) ** 2 @ weights
    # subtle: equal sums may be added in another order, so "at least" needs a little room
    return (1 + int(np.sum(permuted >= observed * (1 - 1e-12)))) / (permutations + 1)


def holm(ps: Sequence[float]) -> list[float]:
    """p-values corrected for being several, step down. (Holm 1979.)

    >>> [round(p, 3) for p in holm([0.01, 0.5, 0.02])]
    [0.03, 0.5, 0.04]
    """
    corrected, least = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        least = max(least, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = least
    return corrected


def first_gap(target, prompt, ours, plain) -> float | None:
    """Between the logits of the first two tokens that differ; None: all are equal."""
    if ours == plain:
        return None
    at = next((i for i, (x, y) in enumerate(zip(ours, plain)) if x != y), None)
    if at is None:  # one is shorter: that is no tie
        return math.inf
    logits = target([*prompt, *plain[:at]], target.new_cache(len(prompt) + at), rows=1)[0]
    return float(abs(logits[ours[at]] - logits[plain[at]]))


class Sampler:
    """Texts of a method after each prompt, each with a seed of its own; ticks after every text."""

    def __init__(self, target, tokenizer, prompts: list[list[int]], tick):
        self.target, self.tokenizer, self.prompts, self.tick = target, tokenizer, prompts, tick
        self.drafter = functools.cache(self.make_drafter)
        self.seeds = itertools.count()

    def make_drafter(self, name: str, K, prompt: tuple):
        draft = minispec.load_drafter(name, self.target, self.tokenizer)
        return draft if K != "auto" else minispec.adaptive(draft, self.target, prompt)

    def __call__(self, method: Method, texts: int, temperature: float) -> list[list]:
        return [[self.answer(method, p, temperature) for _ in range(texts)] for p in self.prompts]

    def answer(self, method: Method, prompt: list[int], temperature: float):
        key = tuple(prompt) if method.K == "auto" else ()
        answer = run(
            self.target, prompt, self.drafter(method.draft, method.K, key),
            minispec.LARGEST_K if method.K == "auto" else method.K,
            temperature=temperature, max_new_tokens=SAMPLED, verify=minispec.RULES[method.verify],
            randomness=minispec.Randomness(next(self.seeds)),
        )  # fmt: skip
        self.tick()
        return finished(answer)


def lossless(args: argparse.Namespace) -> int:
    """Prints the table; 1 when a way does not pass."""
    minispec.check_writable(args.json)
    target, tokenizer, _ = minispec.load_pair(args.target, "none", **minispec.backend_options(args))
    texts = by_group(read_prompts(args.prompts)["measured"], 2).values()
    prompts = [tokenizer.chat(text) for some in texts for text in some]
    less = 10 if args.quick else 1
    ways = [m._replace(texts=max(2, m.texts // less)) for m in (PLAINLY, *methods(args.draft))]

    samples, greedy, seconds = [], [], []
    with progress("sampling", len(prompts) * sum(m.texts + 1 for m in ways)) as bar:
        sampler = Sampler(target, tokenizer, prompts, lambda: bar.update(1))
        for m in ways:
            started = time.perf_counter()
            samples.append(sampler(m, m.texts, m.temperature))
            greedy.append([a.tokens for (a,) in sampler(m, 1, 0.0)])
            seconds.append(time.perf_counter() - started)

    ids = lambda answers: [[a.tokens for a in some] for some in answers]  # noqa: E731
    table = []
    for m, found, best, spent in zip(ways, samples, greedy, seconds):
        gaps = [first_gap(target, *texts) for texts in zip(prompts, best, greedy[0])]
        rounds = [r for some in found for answer in some for r in answer.rounds]
        wrong = sum(gap is not None and gap > NEAR_TIE for gap in gaps)
        tokens = sum(len(r.tokens) for r in rounds)
        table.append(dict(
            method=m.name, tokens=tokens, tokens_per_round=tokens / len(rounds),
            p=permutation_p(ids(found), ids(samples[0])),
            greedy_equal=gaps.count(None), greedy_wrong=wrong,
            near_ties=len(gaps) - gaps.count(None) - wrong, seconds=spent,
        ))  # fmt: skip
    return judge(args, table[1:])


def judge(args: argparse.Namespace, table: list[dict]) -> int:
    """The table with Holm's correction, on stdout and in --json; 1 when a way does not pass."""
    *tested, _, control = table
    for row, p in zip(tested, holm([row["p"] for row in tested])):
        row["holm"] = p
    print(f"{'way to sample':35} tokens tok/round      p Holm p  greedy: same near-tie other    s")
    for t in table:
        print(
            f"{t['method']:35.35} {t['tokens']:6} {t['tokens_per_round']:9.2f} {t['p']:6.4f} "
            f"{figure(t.get('holm'), '6.4f')} {t['greedy_equal']:13} {t['near_ties']:8} "
            f"{t['greedy_wrong']:5} {t['seconds']:4.0f}"
        )
    if args.json:
        report = dict(version=minispec.__version__, machine=machine(), permutations=PERMUTATIONS,
                      near_tie=NEAR_TIE, quick=args.quick, lossless=table)  # fmt: skip
        minispec.write_json(args.json, rounded(report))
    failed = [t["method"] for t in table if t["greedy_wrong"]]
    failed += [t["method"] for t in tested if t["holm"] <= 0.01]
    if not args.quick and control["p"] > 0.01:
        failed.append(f"the test itself, which did not notice the {control['method']}")
    if failed:
        print(f"Not the target's distribution: {'; '.join(failed)}")
        return 1
    print("Every way samples from the target: no Holm-corrected p <= 0.01; greedy answers agree.")
    return 0


# ---------------------------------------------------------------- rules and drafters, side by side

RULES_TOKENS, RULES_K, TEMPERATURES = 64, 4, (0.0, 0.6, 1.0)


def rules(args: argparse.Namespace):
    """What every rule accepts, and gains, with every drafter; all have the same K and prompts."""
    minispec.check_writable(args.json)
    target, tokenizer, _ = minispec.load_pair(args.target, "none", **minispec.backend_options(args))
    names = [args.draft] if args.draft else [minispec.TRAINED, "weights/draft", "ngram"]
    names += [] if args.draft or args.quick else ["early:15", "int4"]
    drafts = {name: minispec.load_drafter(name, target, tokenizer) for name in names}
    texts = by_group(read_prompts(args.prompts)["measured"], 1).values()
    prompts = [tokenizer.chat(text) for some in texts for text in some]
    ways = list(itertools.product(names, minispec.RULES))
    length, found = RULES_TOKENS // (2 if args.quick else 1), []

    def answer(prompt, draft=None, rule="token", **options):
        options |= dict(randomness=minispec.Randomness(0), verify=minispec.RULES[rule])
        result = run(target, prompt, draft, RULES_K, max_new_tokens=length, **options)
        bar.update(1)
        return finished(result)

    with progress("measuring", len(TEMPERATURES) * len(prompts) * (len(ways) + PLAIN)) as bar:
        for t in TEMPERATURES:
            answers = {way: [] for way in ways}
            gains = {way: [] for way in ways}
            for prompt in prompts:  # in turn, between two plain runs
                first = answer(prompt, temperature=t)
                for name, rule in ways:
                    answers[name, rule].append(answer(prompt, drafts[name], rule, temperature=t))
                rates = map(decoding_rate, (first, answer(prompt, temperature=t)))
                plain = statistics.mean(rates)
                for way in ways:
                    gains[way].append(decoding_rate(answers[way][-1]) / plain)
            for way in ways:
                rounds = [r for a in answers[way] for r in a.rounds]
                proposed = sum(len(r.proposals) for r in rounds)
                found.append(dict(
                    temperature=t, draft=way[0], verify=way[1],
                    acceptance=sum(r.accepted for r in rounds) / proposed if proposed else None,
                    tokens_per_round=sum(len(r.tokens) for r in rounds) / len(rounds),
                    speedup=statistics.median(gains[way]),
                ))  # fmt: skip
    show_rules(found, len(prompts), length)
    if args.json:
        report = dict(version=minispec.__version__, machine=machine(), K=RULES_K, tokens=length,
                      prompts=len(prompts), rules=found)  # fmt: skip
        minispec.write_json(args.json, rounded(report))


def show_rules(found: Sequence[dict], prompts: int, length: int):
    print(
        f"K = {RULES_K}; {prompts} prompts, {length} tokens each. Of each rule: % of the proposals "
        "accepted, tokens a\nround, speedup over plain decoding (median over prompts)."
    )
    for t in TEMPERATURES:
        titles = "".join(f"{rule:>20}" for rule in minispec.RULES)
        print(f"\n{f'temperature {t:g}':20}{titles}")
        here = [row for row in found if row["temperature"] == t]
        for name in dict.fromkeys(row["draft"] for row in here):
            cells = (
                f"{figure(row['acceptance'], '7.0%')} {row['tokens_per_round']:5.2f} "
                f"{row['speedup']:5.2f}x"
                for row in here if row["draft"] == name
            )  # fmt: skip
            print(f"{name:20.20}{''.join(cells)}")


# ---------------------------------------------------------------- tables

HEADER = " K tokens Eq.(1)  rows v(K+1)     c overhead predicted measured  % accepted at 1..K"
SUMMARY = " {:3} {:19.19} {:13.13} {:16} {:>2} {:>4} {:>4} {:>4} {:>5} {:>5} {:>3} {:>4} {:>4}"
COLUMNS = (
    "", "draft", "verification", "prompts", "K", "E", "v", "c", "pred.", "meas.", "+-%", "tok/s",
    "/f32",
)  # fmt: skip
LEGEND = (
    " K: the best one measured, E: tokens a round, v: v(K+1), meas.: speedup over plain decoding\n"
    " of the same weights, median over so many prompts; +-%: what of it the clock alone makes\n"
    " uncertain; /f32: tokens/s over those of plain float32 decoding"
)


def show(table: dict):
    """The measured K of one configuration."""
    print(
        f"\n{table['number']}: draft {table['draft']}, {table['verification']}, {table['name']} "
        f"({table['prompts']} prompts), plain {table['plain_tokens_per_second']:.1f} tokens/s\n"
        f"{HEADER}"
    )
    for row in table["by_k"]:
        if "acceptance" not in row:
            continue
        shares = " ".join(f"{100 * share:.0f}" for share in row["acceptance"])
        print(
            f"{row['K']:2} {row['tokens_per_round']:6.2f} {figure(row['tokens_iid'], '6.2f')} "
            f"{row['rows_per_round']:5.2f} "
            f"{figure(row['v'], '6.2f')} {figure(row['c'], '5.3f')} "
            f"{figure(row['overhead'], '8.3f')} {fold(row['predicted'], '-'):>9} "
            f"{fold(row['measured'], 'differ'):>8}  {shares}"
        )


def summarise(tables: Sequence[dict]):
    """Every configuration at its best K, and what decided it."""
    print("\n" + SUMMARY.format(*COLUMNS))
    for t in tables:
        row = next(row for row in t["by_k"] if row["K"] == t["best_k"])
        rate = t["tokens_per_second"]
        print(SUMMARY.format(
            t["number"], t["draft"], t["verification"], f"{t['name']} {t['prompts']}", t["best_k"],
            f"{row['tokens_per_round']:.2f}", figure(row["v"], ".2f"), figure(row["c"], ".2f"),
            fold(t["predicted"], "-"), fold(t["speedup"], "differ"), f"{100 * t['noise']:.0f}",
            f"{rate:.1f}" if rate < 100 else round(rate), figure(t["vs_float32"], ".2f"),
        ))  # fmt: skip
    print(f"{LEGEND}\n")
    for t in tables:
        print(textwrap.fill(f"{t['number']}, {t['name']}: {t['verdict']}.", 100,
                            subsequent_indent="    "))  # fmt: skip


def show_identical(tables: Sequence[dict]):
    rows = [(row, t) for t in tables for row in t["by_k"] if "identical" in row]
    same, total = sum(row["identical"] for row, _ in rows), sum(t["prompts"] for _, t in rows)
    print(f"\n{same} of {total} outputs are those of plain decoding, token for token.")


def figure(value: float | None, form: str) -> str:
    width = form.split(".")[0]
    return f"{'-':>{width}}" if value is None else f"{value:{form}}"


def fold(ratio: float | None, without: str) -> str:
    return without if ratio is None else f"{ratio:.2f}x"


def show_machine(rates: dict, passes: dict[str, dict]):
    one_row, bound = passes["float32"][1], rates["bound"] * 1e9 / rates["bytes"]
    read = f"memory read at {rates['read']:.1f} GB/s, " if "read" in rates else ""
    print(
        f"weights {rates['bytes'] / 1e6:.0f} MB; {read}one-row products at "
        f"{rates['products']:.1f} GB/s: at most {bound:.1f} tokens/s\n"
        f"one-row pass {1e3 * one_row:.1f} ms, {1 / one_row / bound:.2f} of that bound"
    )
    for way, times in passes.items():
        cells = " ".join(f"{T}: {ratio:.2f}" for T, ratio in ratios(passes, way).items())
        print(f"v(T) {way:13} {cells} ({1e3 * times[1]:.0f} ms)")


def compare(files: Sequence[str]):
    """Two reports side by side, configuration by configuration."""
    reports = [read_report(Path(file)) for file in files]
    for name, file, r in zip("AB", files, reports):
        target = r["configurations"][0]["target"]
        print(f"{name} {file}: target {target}, temperature {r['temperature']}, {r['backend']}")
    line = " {:3} {:19.19} {:13} {:13} {:>4} {:>6} {:>4} {:>6} {:>6}  {}"
    head = "", "draft", "verification", "prompts", "A: K", "", "B: K", "", "B / A", "within noise"
    print("\n" + line.format(*head))
    names = ("number", "draft", "verification", "name")
    keys = [{tuple(c[k] for k in names): c for c in r["configurations"]} for r in reports]
    missing = {"best_k": "-", "speedup": None, "noise": 0.0}
    for key in dict.fromkeys(itertools.chain(*keys)):
        sides = [found.get(key, missing) for found in keys]
        gains, noises = [s["speedup"] for s in sides], sum(s["noise"] for s in sides)
        cells = [c for side in sides for c in (side["best_k"], fold(side["speedup"], "-"))]
        ratio = gains[1] / gains[0] if all(gains) else None
        within = "-" if ratio is None else "yes" if abs(ratio - 1) <= noises else "no"
        print(line.format(*key, *cells, figure(ratio, ".2f"), within))
    print()
    for label, key in ("one-row pass, ms", "one_row_ms"), ("bandwidth, GB/s", "bandwidth_gb_s"):
        a, b = (r["verification"].get(key, r.get(key)) for r in reports)
        print(f"{label:20} A {a:6.1f}, B {b:6.1f}")


def read_report(path: Path) -> dict:
    from model import read_json

    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such report; bench.py --json writes one")
    report = read_json(path)
    if report.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} is no report of schema {SCHEMA}: write it again with this bench.py --json"
        )
    return report


# ---------------------------------------------------------------- the plot

# Okabe and Ito's colours, which the colour-blind can tell apart; markers and dashes say it again.
COLOURS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933"
MARKERS, DASHES = "osD^vPXh", ("-", "--", "-.", ":")


def require_matplotlib():
    try:
        import matplotlib
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'minispec[bench]'") from None
    return matplotlib


def plot(report: dict, file: str):
    """Four panels: speedup and acceptance against K, v(T), where a round's time goes."""
    require_matplotlib().use("agg")
    import matplotlib.pyplot as plt

    tables = report["configurations"]
    for i, t in enumerate(tables):
        t["label"] = f"{t['number']}: {t['draft'].replace('weights/draft', 'trained')}, " + (
            t["verification"] if t["name"] != "copy-heavy" else "copy-heavy prompts"
        )
        t["style"] = dict(color=COLOURS[i % 8], marker=MARKERS[i % 8], linestyle=DASHES[i // 8 % 4])
    figure, panels = plt.subplots(2, 2, figsize=(13, 9.5), layout="constrained")
    plot_speedups(panels[0][0], tables)
    plot_acceptance(panels[0][1], tables)
    plot_passes(panels[1][0], report["verification"]["v"])
    plot_rounds(panels[1][1], tables)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    cpu = report["machine"]["processor"]
    figure.suptitle(
        f"minispec {report['version']}, {cpu}, {report['backend']}: plain decoding "
        f"{report['plain_tokens_per_second']:.1f} tokens/s", fontsize=11
    )  # fmt: skip
    written = Path(file).with_name(f".{Path(file).stem}.{os.getpid()}{Path(file).suffix}")
    try:
        figure.savefig(written, dpi=110)
        os.replace(written, file)
    finally:
        written.unlink(missing_ok=True)
        plt.close(figure)


def plot_speedups(ax, tables):
    for t in tables:
        predicted = [(row["K"], row["predicted"]) for row in t["by_k"] if row["predicted"]]
        measured = [(row["K"], row["measured"]) for row in t["by_k"] if row["measured"]]
        style = t["style"]
        ax.plot(*zip(*predicted or [(1, math.nan)]), **style | {"marker": ""}, linewidth=1.2)
        ax.plot(*zip(*measured or [(1, math.nan)]), **style | {"linestyle": ""}, label=t["label"],
                markersize=9, markeredgecolor="white")  # fmt: skip
    ax.axhline(1, color="black", linewidth=1)
    ax.set_yscale("log", base=2)
    ticks = [0.125, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6]
    low, high = ax.get_ylim()
    shown = [tick for tick in ticks if low <= tick <= high]
    ax.set_yticks(shown, [f"{tick:g}" for tick in shown])
    ax.minorticks_off()
    ax.set(
        title="Speedup: points measured, lines predicted beforehand", xlabel="K, proposals a round",
        ylabel="times plain decoding of the same target",
    )  # fmt: skip
    ax.grid(alpha=0.3)


def plot_acceptance(ax, tables):
    for t in tables:
        row = max((r for r in t["by_k"] if "acceptance" in r), key=lambda r: r["K"])
        shares = [100 * share for share in row["acceptance"]]
        ax.plot(range(1, len(shares) + 1), shares, **t["style"], markeredgecolor="white")
    ax.set(
        title="Acceptance at the largest measured K", xlabel="i, position of the proposal",
        ylabel="rounds with i proposals that had i accepted, %", ylim=(0, 104),
    )  # fmt: skip
    ax.grid(alpha=0.3)


def plot_passes(ax, v: dict):
    for i, (way, ratios) in enumerate(v.items()):
        Ts = [int(T) for T in ratios]
        ax.plot(Ts, list(ratios.values()), color=COLOURS[i], marker=MARKERS[i], label=way)
    ax.plot(Ts, [1] * len(Ts), color="black", linestyle=":", label="ideal: rows for nothing")
    ax.set(
        title="v(T): what verifying T rows costs", xlabel="T, rows in the pass (K + 1)",
        ylabel="one-row passes over the same weights", ylim=(0, None),
    )  # fmt: skip
    ax.legend(fontsize=9)
    ax.grid(alpha=0.3)


def plot_rounds(ax, tables):
    parts = ("draft", "#E69F00", "///"), ("verification", "#56B4E9", ""), ("rest", "#999999", "xx")
    for y, t in enumerate(tables):
        row, left = next(r for r in t["by_k"] if r["K"] == t["best_k"]), 0.0
        for name, colour, hatch in parts:
            width = row["split"][name]
            ax.barh(y, width, left=left, color=colour, hatch=hatch, edgecolor="black",
                    linewidth=0.5, label=name if y == 0 else None)  # fmt: skip
            left += width
        ax.plot(row["tokens_per_round"], y, marker="D", color="black", linestyle="",
                label="tokens a round: right of the bar = faster" if y == 0 else None)  # fmt: skip
    copy = {"copy-heavy": " copy-heavy"}
    names = [f"{t['number']}{copy.get(t['name'], '')}, K={t['best_k']}" for t in tables]
    ax.set_yticks(range(len(tables)), names)
    ax.set_ylim(len(tables) + 1.2, -0.6)  # from the top down, with room for the legend
    ax.set(
        title="Where the time of a round goes, at the best K",
        xlabel="plain steps of the same target (bar), tokens (diamond)",
    )  # fmt: skip
    ax.legend(fontsize=9, loc="lower center", ncols=2)
    ax.grid(alpha=0.3, axis="x")


def rounded(value):
    """The same figures with four significant digits: more was not measured."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


# ---------------------------------------------------------------- the command line

SCHEMA = 2  # of the JSON report; README says what is in it


def read_prompts(path: Path) -> dict:
    """{"measured": {kind: [text]}, "calibration": {kind: [text]}}; ValueError if it is not so.

    Kinds are those of GROUPS. One may be left out, but then in both parts, and not all of a group;
    no text may be in both parts.
    """
    from model import read_json

    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file of prompts")
    read, found = read_json(path), {}
    known = [kind for kinds in GROUPS.values() for kind in kinds]
    for part in "measured", "calibration":
        texts = read.get(part)
        if not isinstance(texts, dict) or not set(texts) <= set(known):
            raise ValueError(f"{path} needs {part} prompts, of the kinds {', '.join(known)}")
        for kind, some in texts.items():
            whole = isinstance(some, list) and all(isinstance(t, str) and t.strip() for t in some)
            if not whole:
                raise ValueError(f"{path}: {part}, {kind} must be a list of texts, none empty")
        found[part] = {kind: texts.get(kind, []) for kind in known}
        for group, kinds in GROUPS.items():
            if not any(found[part][kind] for kind in kinds):
                raise ValueError(f"{path} has no {part} prompts for {group}: {', '.join(kinds)}")
    for kind in known:
        ours, others = found["measured"][kind], found["calibration"][kind]
        if bool(ours) != bool(others) or set(ours) & set(others):
            raise ValueError(f"{path}: {kind} needs measured and calibration prompts that differ")
    return found


def first_answer(target, tokenizer, draft):
    print(f"> {minispec.EXAMPLE}")
    printer = minispec.Printer(tokenizer)
    prompt = tokenizer.chat(minispec.EXAMPLE)
    answer = run(target, prompt, draft, stop=tokenizer.stop, show=printer.show)
    printer.end()
    print(f"{answer}\n")
    finished(answer)


def by_group(prompts: dict, each: int | None) -> dict[str, list]:
    """{kind: [prompt]} -> {group: [prompt]}, the first `each` of every kind."""
    return {g: [p for kind in kinds for p in prompts[kind][:each]] for g, kinds in GROUPS.items()}


class Calibration:
    """Known continuations of the calibration prompts, and what each draft would do on them.

    Ways with the same weights share all of it: only their pass times differ.
    """

    def __init__(self, models: dict, prompts: dict, stop, setups: Sequence[Setup]):
        self.models, self.prompts, self.stop, self.setups = models, prompts, stop, setups
        self.texts: dict[tuple, list[Known]] = {}
        self.rehearsals: dict[tuple, list] = {}
        self.hosts: dict[tuple, HostTimes] = {}

    def predict(self, setup: Setup, passes: dict[str, dict]) -> dict[int, Prediction]:
        tokens, texts = setup.tokens, self.known(setup)
        key = setup.weights, setup.group, setup.draft.name
        if key not in self.rehearsals:
            vocab = self.models[setup.way].vocab
            self.rehearsals[key] = [rehearse(k, setup.draft, vocab) for k in texts]
        key = *key, tokens
        if key not in self.hosts:
            two = [k._replace(more=k.more[:tokens]) for k in (texts[:1] + texts[-1:])[: len(texts)]]
            self.hosts[key] = host_times(self.models[setup.way], two, setup.draft)
        v = ratios(passes, setup.way)
        rehearsals = [r[: tokens - 1] for r in self.rehearsals[key[:3]]]
        Ks = range(1, MOST_K + 1)
        return {K: predict(rehearsals, K, v, self.hosts[key]) for K in Ks}

    def known(self, setup: Setup) -> list[Known]:
        key = setup.weights, setup.group
        if key not in self.texts:
            alike = [s for s in self.setups if (s.weights, s.group) == key]
            most = max(s.tokens for s in alike)
            fast = [s.draft for s in alike if not reads_text_only(s.draft)]
            target = self.models["int4 batched" if setup.weights == "int4" else "float32"]
            draft = fast[0] if fast else None
            texts = (
                known_continuation(target, prompt, self.stop, most, draft)
                for prompt in self.prompts[setup.weights][setup.group]
            )
            # The first round may emit MOST_K + 1 tokens, and there is to be one after it.
            self.texts[key] = [k for k in texts if len(k.more) > MOST_K + 1]
            if not self.texts[key]:
                raise ValueError(
                    f"no calibration prompt of {setup.group} has an answer of {MOST_K + 2} tokens"
                )
        return self.texts[key]


def load_models(args: argparse.Namespace, target, packed, wanted: set[str]) -> dict[str, Model]:
    """{way: model}, of the ways that are wanted and differ on this machine."""
    models = {"float32": target}
    if {"int4 batched", "int4 serial"} & wanted:
        models |= {"int4 batched": packed(), "int4 serial": verify_serially(packed())}
    if "float32 plain" in wanted and "tiles" in target.backend.name:
        models["float32 plain"] = load(resolve(args.target), numpy_backend(way="plain"))
    return models


def plan(args: argparse.Namespace, size: Size, target, draft, packed) -> list[Setup]:
    """What is measured, with these options. packed() is the target in 4 bits."""
    Ks, rest = size.other_Ks or size.Ks, (size.tokens, size.each)
    if args.quantize:
        ways = "int4 serial", "int4 batched"
        few = (), size.few_tokens, size.few_each
        return [Setup("P", way, draft, group, *few) for group in GROUPS for way in ways]
    if args.draft:
        return [Setup("P", "float32", draft, group, Ks, *rest) for group in GROUPS]
    drafts = {"ngram": minispec.PromptLookup()}
    if isinstance(draft, minispec.Chain):
        drafts |= {"trained": draft.drafters[-1], "chain": draft}
    if args.temperature or target.backend.xp is not np:
        if args.temperature == 0:
            print("4-bit weights are packed for NumPy only: configurations 3, 4 and 5 are left out")
        names = {"trained": "1", "chain": "1+2", "ngram": "2"}
        return [
            Setup(names[name], "float32", drafts[name], group, Ks, *rest)
            for group in GROUPS for name in names if name in drafts
        ]  # fmt: skip
    drafts["int4"] = minispec.ModelDraft(packed(), "int4")
    return five_configurations(drafts, size, args.quick)


def bench(args: argparse.Namespace):
    check_arguments(args)
    size = SIZES["quick" if args.quick else "full" if args.full else "default"]
    prompts = read_prompts(args.prompts)
    target, tokenizer, draft = minispec.load_pair(
        args.target, args.draft, **minispec.backend_options(args)
    )  # fmt: skip
    ids = {part: {kind: [tokenizer.chat(text) for text in texts] for kind, texts in kinds.items()}
           for part, kinds in prompts.items()}  # fmt: skip
    first_answer(target, tokenizer, draft)

    packed = functools.cache(partial(quantize, target))
    setups = plan(args, size, target, draft, packed)
    models = load_models(args, target, packed, {s.way for s in setups})
    setups = [s for s in setups if s.way in models]
    rates = bandwidth(target)
    passes = all_passes(models, args.quick)
    show_machine(rates, passes)

    # At temperature 0 the answers end where they end; above, all have the same number of tokens.
    stop = () if args.temperature else tokenizer.stop
    if args.temperature == 0:  # a plain run is known beforehand at temperature 0 only
        calibration = {w: by_group(ids["calibration"], n) for w, n in size.calibration.items()}
        known = Calibration(models, calibration, stop, setups)
        with progress("predicting", len(setups)) as bar:
            for setup in setups:
                setup.predictions = known.predict(setup, passes)
                setup.settle(size.beside)
                bar.update(1)

    options = dict(stop=stop, temperature=args.temperature)
    results = measure_all(setups, models, ids["measured"], passes, **options)
    tables = [configuration(s, found, passes) for s, found in zip(setups, results)]
    report(args, rates, passes, tables, target)


def progress(name: str, total: float):
    form = "{desc} {percentage:3.0f}% |{bar}| {elapsed} elapsed, {remaining} left"
    return tqdm(total=total, desc=name, file=sys.stderr, bar_format=form, leave=False)


def report(args, rates, passes, tables: list[dict], target):
    """Everything measured, on stdout, and in the files that were asked for."""
    plain = {t["name"]: t["plain_tokens_per_second"] for t in reversed(tables)
             if t["verification"] == "float32"}  # fmt: skip
    for t in tables:
        beside = plain.get(t["name"])
        t["target"] = args.target or "default"
        t["vs_float32"] = t["tokens_per_second"] / beside if beside else None
        show(t)
    summarise(tables)
    if args.temperature == 0:
        show_identical(tables)
    found = dict(
        version=minispec.__version__, schema=SCHEMA, machine=machine(), backend=target.backend.name,
        temperature=args.temperature, bandwidth_gb_s=rates["bound"], bandwidth=rates,
        plain_tokens_per_second=tables[0]["plain_tokens_per_second"], configurations=tables,
        verification=dict(
            one_row_ms=1e3 * passes["float32"][1],
            v={way: {str(T): x for T, x in ratios(passes, way).items()} for way in passes},
            ways_ms=getattr(target.backend.linear, "milliseconds", None),
        ),
    )  # fmt: skip
    if args.json:
        minispec.write_json(args.json, rounded(found))
    if args.plot:
        plot(rounded(found), args.plot)
    if not sys.stdout.isatty():  # for programs: a person has the table, and --json
        print("\n" + json.dumps(rounded(found)))


def check_arguments(args: argparse.Namespace):
    """Raises before anything is loaded or timed."""
    minispec.check_sampling(args.temperature, None, 1.0)
    if args.temperature and args.quantize:
        raise ValueError("--quantize is analysed at temperature 0: leave --temperature out")
    minispec.check_writable(args.json)
    minispec.check_writable(args.plot)
    if args.plot:
        if Path(args.plot).suffix not in (".png", ".svg"):
            raise ValueError(f"--plot writes .png or .svg, not {args.plot}")
        require_matplotlib()


def main(argv: Sequence[str] | None = None) -> int:
    say = minispec.Parser(prog="bench.py", description="What speculation gains here, and why.")
    size = say.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="less of everything, under a minute")
    size.add_argument("--full", action="store_true", help="every K from 1 to 8, longer answers")
    say.add_argument("--pair", nargs=2, metavar=("TARGET", "DRAFT"), help="only these two")
    say.add_argument("--target", metavar="DIR_OR_ID", help="checkpoint folder or hub id")
    say.add_argument("--draft", metavar="DIR_OR_ID|ngram|int4", help="only this, or this chain")
    say.add_argument("--quantize", choices=["int4"], help="verify in 4 bits, serially and batched")
    minispec.add_backend_options(say)
    say.add_argument("--temperature", type=float, default=0.0, help="above 0: no predictions")
    say.add_argument("--prompts", type=Path, default=PROMPTS, metavar="FILE")
    say.add_argument("--json", metavar="FILE", help="also write the figures there")
    say.add_argument("--plot", metavar="FILE", help="draw them: .png or .svg")
    say.add_argument("--compare", nargs=2, metavar=("A.json", "B.json"), help="two runs, in turn")
    say.add_argument("--verification", action="store_true", help="only v(T), plain and in tiles")
    say.add_argument("--rules", action="store_true", help="only: every rule with every drafter")
    say.add_argument("--lossless", action="store_true", help="only test: is the law the target's?")
    return minispec.guard("bench.py", lambda: dispatch(say, say.parse_args(argv)))


def dispatch(say: argparse.ArgumentParser, args: argparse.Namespace):
    given = {name for name, value in vars(args).items() if value != say.get_default(name)}
    for alone, with_it in (
        ("compare", set()), ("verification", {"target", "json"}),
        *((mode, {"target", "draft", "backend", "device", "dtype", "prompts", "json", "quick"})
          for mode in ("rules", "lossless")),
    ):  # fmt: skip
        if alone in given and given - with_it - {alone}:
            others = ", ".join(f"--{name}" for name in sorted(given - with_it - {alone}))
            raise ValueError(f"--{alone} has no use for {others}: leave it out")
    if args.pair:
        if {"target", "draft"} & given:
            raise ValueError("--pair names target and draft: leave --target and --draft out")
        args.target, args.draft = args.pair
    if args.compare:
        return compare(args.compare)
    only = dict(verification=verification, rules=rules, lossless=lossless)
    return next((work for name, work in only.items() if getattr(args, name)), bench)(args)


if __name__ == "__main__":
    sys.exit(main())
