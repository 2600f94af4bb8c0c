"""What speculative decoding gains on this machine, and why.

    python bench.py --quick         # one streamed answer, then first tables, in less than a minute
    python bench.py                 # all prompts, in 12 minutes; --full for every K from 1 to 8
    python bench.py --verification  # only v(T): BLAS's own way against tiles

Drafts: the trained one, prompt lookup, and the two as a chain. What is measured, in this order:
    bandwidth   how fast the weights can be read at all: no one-row pass can be faster
    v(T)        seconds of a target pass over T rows / over one row, at the context in use
    prediction  from v, and from replaying each drafter on calibration prompts: their plain
                continuations are known, so acceptance, the drafter's time and the host's own cost
                no pass of the target
    measurement plain and speculative decoding in turn, on other prompts; prefill is left out

Letters: K proposals a round, T rows in a pass, c = time of one draft step / of a one-row pass.

What this file does not do: quantized targets, predictions at temperatures above 0, plots.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_info
from tqdm import tqdm

import minispec
from minispec import Round, run
from model import Model, llama_block, llama_config, load, numpy_backend
from weights.fetch import resolve

PROMPTS = Path(__file__).with_name("prompts.json")
GROUPS = {"chat and code": ("chat", "code"), "copy-heavy": ("copy",)}

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


def bandwidth(target, repeats: int = 9) -> dict:
    """Gigabytes a second: a plain read by one thread per core, and all one-row products.

    The larger of the two bounds one-row decoding from above. The read is one of the larger half of
    the matrices, which together do not fit a cache.
    """
    all_W = matrices(target)
    sizes = [W.nbytes for W in all_W]
    large = [getattr(W, "stack", W) for W in all_W if W.nbytes >= statistics.median(sizes)]
    rows = {W.shape[1]: np.ones((1, W.shape[1]), target.backend.dtype) for W in all_W}
    cores = os.cpu_count() or 1
    shares = [large[i::cores] for i in range(cores)]
    with ThreadPoolExecutor(cores) as pool:
        read = lambda share: [np.max(W) for W in share]  # noqa: E731
        reads = [seconds(lambda: list(pool.map(read, shares))) for _ in range(repeats)]
    with target.backend.during_pass(1):
        products = [
            seconds(lambda: [target.backend.linear(rows[W.shape[1]], W) for W in all_W])
            for _ in range(repeats)
        ]
    rates = {
        "read": sum(W.nbytes for W in large) / statistics.median(reads) / 1e9,
        "products": sum(sizes) / statistics.median(products) / 1e9,
    }
    return rates | {"bound": max(rates.values()), "bytes": sum(sizes)}


def seconds(function) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def pass_seconds(targets, most_rows: int, context: int = 200, repeats: int = 7) -> list[dict]:
    """For each target: median seconds of a pass over T = 1..most_rows rows ending at `context`.

    One untimed pass of each kind first; then all kinds in turn, so that a drift meets them all.
    Between targets a pause: BLAS's threads go on spinning for a while, on the cores of the next.
    """
    context = min(context, *(target.context for target in targets))
    tokens = [i % targets[0].vocab for i in range(context)]
    caches = [target.new_cache(context) for target in targets]
    for target, cache in zip(targets, caches):
        target(tokens, cache, rows=1)
    times: list[dict] = [{T: [] for T in range(1, most_rows + 1)} for _ in targets]
    for repeat in range(repeats + 1):
        for i, T in itertools.product(range(len(targets)), times[0]):
            if T == 1 and len(targets) > 1:
                time.sleep(0.2)
            caches[i].truncate(context - T)
            spent = timed_pass(targets[i], tokens, caches[i], T)
            if repeat:  # the first is the warm-up
                times[i][T].append(spent)
    return [{T: statistics.median(t) for T, t in each.items()} for each in times]


def timed_pass(target, tokens, cache, rows: int) -> float:
    target.backend.synchronize()
    started = time.perf_counter()
    target(tokens, cache, rows=rows)
    target.backend.synchronize()
    return time.perf_counter() - started


# ---------------------------------------------------------------- prediction


class Known(NamedTuple):
    """A prompt, its plain greedy continuation, and the target's states [tokens, D] of both."""

    prompt: list[int]
    more: list[int]
    states: np.ndarray


class Replay:
    """A target that already knows its greedy continuation, and whose passes cost nothing.

    Greedy rounds with it are those of the real target, token for token, so a drafter's acceptance
    at every K, its time and the host's for a round can be had from one plain run. For the drafter's
    sake a pass drives as much through the processor's cache as a real one leaves there.
    """

    def __init__(self, known: Known, target):
        self.tokens, self.states = [*known.prompt, *known.more], known.states
        self.vocab, self.context = target.vocab, target.context
        sizes = itertools.accumulate(W.nbytes for W in matrices(target))
        passing = itertools.takewhile(lambda pair: pair[1] < 64e6, zip(matrices(target), sizes))
        self.passing = [getattr(W, "stack", W) for W, _ in passing]

    class Cache:
        length = 0

        def truncate(self, length):
            self.length = length

    def new_cache(self, capacity):
        cache = self.Cache()
        cache.states = self.states
        return cache

    def __call__(self, tokens, cache, rows):
        for W in self.passing:
            np.max(W)
        cache.length = len(tokens)
        logits = np.zeros((rows, self.vocab), np.float32)
        for i, position in enumerate(range(len(tokens) - rows + 1, len(tokens) + 1)):
            if position < len(self.tokens):  # else: past the last known token, never emitted
                logits[i, self.tokens[position]] = 1.0
        return logits


@dataclass
class Tally:
    """Counts over rounds, the first one of each generation (with the prompt in it) left out."""

    tokens: int
    rounds: int
    rows: list[int]  # of every target pass
    acceptance: list[
        float
    ]  # [i-1]: of the rounds with >= i proposals, the share with >= i accepted

    @classmethod
    def of(cls, generations: Sequence[Sequence[Round]], K: int) -> Tally:
        rounds = [r for g in generations for r in g[1:]]
        shares = []
        for i in range(1, K + 1):
            reached = [r.accepted >= i for r in rounds if len(r.proposals) >= i]
            shares.append(sum(reached) / len(reached) if reached else 0.0)
        rows = [len(r.proposals) + 1 for r in rounds]
        return cls(sum(len(r.tokens) for r in rounds), len(rounds), rows, shares)

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0


@dataclass
class Prediction:
    """What a K should gain: speedup = plain seconds a token x tokens / (passes + host's time)."""

    speedup: float
    c: float  # draft seconds a proposal / one-row pass
    overhead: float  # host seconds a round, drafting left out / one-row pass


def predict(target, known: Sequence[Known], draft, K: int, one_pass: dict[int, float]):
    """From pass times and replays; medians over the known continuations."""
    each = [predict_one(target, k, draft, K, one_pass) for k in known]
    return Prediction(*(statistics.median(values) for values in zip(*each)))


def predict_one(target, known: Known, draft, K, one_pass) -> tuple[float, float, float]:
    def replay(draft, K):
        target_again, most = Replay(known, target), len(known.more)
        answer = run(target_again, known.prompt, draft, K, max_new_tokens=most)
        host = (answer.seconds - answer.verification) / len(answer.rounds)
        return answer, Tally.of([answer.rounds], K), host

    _, _, plain_host = replay(None, 0)
    answer, tally, host = replay(draft, K)
    round_seconds = statistics.fmean(one_pass[T] for T in tally.rows) + host
    speedup = (one_pass[1] + plain_host) * tally.tokens_per_round / round_seconds
    proposals = sum(len(r.proposals) for r in answer.rounds)
    overhead = host - answer.draft / len(answer.rounds)
    return speedup, answer.draft / max(1, proposals) / one_pass[1], overhead / one_pass[1]


# ---------------------------------------------------------------- measurement


def decoding_rate(answer: minispec.Answer) -> float:
    """Tokens a second after the first round, whose pass holds the prompt."""
    tokens = len(answer.tokens) - len(answer.rounds[0].tokens)
    return tokens / (answer.seconds - answer.first_round)


def measure_prompt(target, prompt, stop, drafts: dict, Ks, tick, **options) -> dict:
    """Plain decoding and each draft at each K in turn: {"plain": [answers], (draft, K): answer}."""

    def answer(draft, K):
        randomness = minispec.Randomness(seed=0)
        result = run(target, prompt, draft, K, stop=stop, randomness=randomness, **options)
        if result.ended == "interrupted":
            raise KeyboardInterrupt
        tick()
        return result

    results: dict = {"plain": [answer(None, 0)]}
    check_length(results["plain"][0].tokens, Ks)
    for K in Ks:
        for name, draft in drafts.items():
            results[name, K] = answer(draft, K)
        results["plain"].append(answer(None, 0))
    return results


def check_length(tokens, Ks):
    if len(tokens) < 2 * (max(Ks) + 1):
        raise ValueError(
            f"an answer of {len(tokens)} tokens is too short to time: change the prompt"
        )


def speedup_of(results: dict, key: tuple[str, int]) -> float | None:
    """Speculative over plain rate; None where the two did not emit equally many tokens."""
    if any(len(results[key].tokens) != len(p.tokens) for p in results["plain"]):
        return None
    return decoding_rate(results[key]) / plain_rate(results)


def plain_rate(results: dict) -> float:
    return statistics.median(decoding_rate(p) for p in results["plain"])


def at_K(results: list[dict], draft: str, K: int, prediction: Prediction | None, v: float) -> dict:
    """One row of a table: medians over the prompts, acceptance over all rounds."""
    answers = [r[draft, K] for r in results]
    tallies = [Tally.of([a.rounds], K) for a in answers]
    speedups = [speedup_of(r, (draft, K)) for r in results]
    alike = None not in speedups
    tokens = [t.tokens_per_round for t in tallies]
    return dict(
        K=K, acceptance=Tally.of([a.rounds for a in answers], K).acceptance,
        tokens_per_round=statistics.median(tokens),
        rows_per_round=statistics.median(statistics.fmean(t.rows) for t in tallies),
        v=v, c=prediction and prediction.c, overhead=prediction and prediction.overhead,
        predicted=prediction and prediction.speedup,
        measured=statistics.median(speedups) if alike else None,
        spread=[min(speedups), max(speedups)] if alike else None,
        cost=statistics.median(t / s for t, s in zip(tokens, speedups)) if alike else None,
        identical=sum(a.tokens == r["plain"][0].tokens for a, r in zip(answers, results)),
    )  # fmt: skip


def configuration(name, target: str, draft: str, results: list[dict], Ks, predictions, v) -> dict:
    """One table: what was predicted and measured for every K, and which K is the best."""
    by_k = [at_K(results, draft, K, predictions.get((draft, K)), v[K + 1]) for K in Ks]
    best = max(by_k, key=lambda row: row["measured"] or 0.0)
    return dict(
        name=name, target=target, draft=draft, verification="token", quantize=None,
        prompts=len(results), plain_tokens_per_second=statistics.median(map(plain_rate, results)),
        c=best["c"], v={str(T): ratio for T, ratio in v.items()}, by_k=by_k, best_k=best["K"],
        speedup=best["measured"], predicted=best["predicted"], verdict=verdict(best),
    )  # fmt: skip


def verdict(row: dict) -> str:
    if row["measured"] is None:
        return "no speedup: plain and speculative outputs differ in length"
    low, high = row["spread"]
    spread = f" ({low:.2f}x to {high:.2f}x)" if low < high else ""
    return (
        f"{row['measured']:.2f}x at K={row['K']}, the best{spread}: a round yields "
        f"{row['tokens_per_round']:.2f} tokens and costs {row['cost']:.2f} plain steps"
    )


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
        return places

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
        times = dict(zip(("plain", "tiles"), pass_seconds([plain, tiled], 17)))
        one_row = min(seconds[1] for seconds in times.values())
        bound = rates["bytes"] / rates["bound"] / 1e6
        prefill = [statistics.median(timed_prefill(t) for _ in range(3)) for t in (plain, tiled)]
        print(
            f"{name}: {rates['bytes'] / 1e6:.0f} MB, at {rates['bound']:.1f} GB/s {bound:.1f} ms; "
            f"fastest one-row pass {1e3 * one_row:.1f} ms\n"
            f"prefill of 512 tokens: plain {prefill[0]:.2f} s, tiles {prefill[1]:.2f} s\n"
            " T   plain ms  v(T)   tiles ms  v(T)"
        )
        for T in times["plain"]:
            cells = (f"{1e3 * t[T]:10.1f} {t[T] / one_row:5.2f}" for t in times.values())
            print(f"{T:2} {' '.join(cells)}")
        report[name] = dict(
            bandwidth=rates, one_row_ms=1e3 * one_row, prefill_512_s=dict(zip(times, prefill)),
            pass_ms={way: {T: 1e3 * s for T, s in t.items()} for way, t in times.items()},
        )  # fmt: skip
        del plain, tiled
    if args.json:
        minispec.write_json(args.json, rounded(report))


def timed_prefill(target, length: int = 512) -> float:
    length = min(length, target.context)
    tokens = [i % target.vocab for i in range(length)]
    return timed_pass(target, tokens, target.new_cache(length), 1)


# ---------------------------------------------------------------- output

HEADER = " K tokens/round rows/round v(K+1)     c overhead predicted measured  % accepted at 1..K"


def show(table: dict):
    print(
        f"\ndraft {table['draft']}, {table['name']} (prompts: {table['prompts']}), against plain "
        f"decoding at {table['plain_tokens_per_second']:.1f} tokens/s\n{HEADER}"
    )
    for row in table["by_k"]:
        shares = " ".join(f"{100 * share:.0f}" for share in row["acceptance"])
        print(
            f"{row['K']:2} {row['tokens_per_round']:12.2f} {row['rows_per_round']:10.2f} "
            f"{row['v']:6.2f} {figure(row['c'], '5.3f')} {figure(row['overhead'], '8.3f')} "
            f"{times(row['predicted'], '-'):>9} {times(row['measured'], 'differ'):>8}  {shares}"
        )
    print(table["verdict"])


def figure(value: float | None, form: str) -> str:
    return f"{'-':>{form[0]}}" if value is None else f"{value:{form}}"


def times(ratio: float | None, without: str) -> str:
    return without if ratio is None else f"{ratio:.2f}x"


def show_machine(rates: dict, one_pass: dict[int, float]):
    bound = rates["bound"] * 1e9 / rates["bytes"]
    print(
        f"weights {rates['bytes'] / 1e6:.0f} MB; memory read at {rates['read']:.1f} GB/s, one-row "
        f"products at {rates['products']:.1f} GB/s: at most {bound:.1f} tokens/s"
    )
    print(f"one-row pass {1e3 * one_pass[1]:.1f} ms, {1 / one_pass[1] / bound:.2f} of that bound")
    print("v(T)  " + "  ".join(f"{T}: {s / one_pass[1]:.2f}" for T, s in one_pass.items()))


def rounded(value):
    """The same figures with four significant digits: more was not measured."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def read_prompts(path: Path) -> dict:
    """{"measured": {kind: [text]}, "calibration": {kind: [text]}}; ValueError if it is not so."""
    from model import read_json

    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file of prompts")
    found: dict = {"measured": {}, "calibration": {}}
    read = read_json(path)
    for part, kind in itertools.product(found, ("chat", "code", "copy")):
        texts = read[part].get(kind) if isinstance(read.get(part), dict) else None
        if not isinstance(texts, list) or not texts:
            raise ValueError(f"{path} needs a list of texts at {part}, {kind}")
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(f"{path}: every prompt at {part}, {kind} must be a text, not empty")
        found[part][kind] = texts
    return found


def first_answer(target, tokenizer, draft):
    print(f"> {minispec.EXAMPLE}")
    printer = minispec.Printer(tokenizer)
    prompt = tokenizer.chat(minispec.EXAMPLE)
    answer = run(target, prompt, draft, stop=tokenizer.stop, show=printer.show)
    printer.end()
    print(f"{answer}\n")
    if answer.ended == "interrupted":
        raise KeyboardInterrupt


def by_group(prompts: dict, each: int | None) -> dict[str, list]:
    """{kind: [prompt]} -> {group: [prompt]}, the first `each` of every kind."""
    return {g: [p for kind in kinds for p in prompts[kind][:each]] for g, kinds in GROUPS.items()}


def known_continuation(target, prompt, stop, most_tokens: int, Ks) -> Known:
    more = list(minispec.autoregressive(target, prompt, max_new_tokens=most_tokens, stop=stop))
    check_length(more, Ks)
    cache = target.new_cache(len(prompt) + len(more))
    target([*prompt, *more], cache, rows=1)
    return Known(prompt, more, cache.states)


def plan_of(args: argparse.Namespace, draft) -> dict[str, tuple]:
    """{group: (names of drafts, Ks)}: what is measured."""
    if args.draft or draft.name != minispec.TRAINED:
        drafts = dict.fromkeys(GROUPS, (draft.name,))
    else:
        trained = draft.name.split(",")[-1]
        drafts = {
            "chat and code": (trained, draft.name, "ngram"), "copy-heavy": ("ngram", draft.name)
        }  # fmt: skip
    if args.full:
        return {group: (names, range(1, 9)) for group, names in drafts.items()}
    Ks = {"chat and code": (1, 2, 3, 4, 6), "copy-heavy": (1, 2, 4, 8)}
    if args.quick:
        Ks = {"chat and code": (2, 4), "copy-heavy": (2, 8)}
    return {group: (names, Ks[group]) for group, names in drafts.items()}


def bench(args: argparse.Namespace):
    minispec.check_sampling(args.temperature, None, 1.0)
    minispec.check_writable(args.json)
    prompts = read_prompts(args.prompts)
    target, tokenizer, draft = minispec.load_pair(args.target, args.draft)
    ids = {part: {kind: [tokenizer.chat(text) for text in texts] for kind, texts in kinds.items()}
           for part, kinds in prompts.items()}  # fmt: skip
    plan, most_tokens, each = plan_of(args, draft), 48 if args.quick else 128, args.quick or None
    names = dict.fromkeys(name for drafts, _ in plan.values() for name in drafts)
    drafters = {name: minispec.load_drafter(name, target, tokenizer) for name in names}
    first_answer(target, tokenizer, draft)

    rates = bandwidth(target)
    (one_pass,) = pass_seconds([target], max(K for _, Ks in plan.values() for K in Ks) + 1)
    show_machine(rates, one_pass)
    v = {T: s / one_pass[1] for T, s in one_pass.items()}

    predictions: dict = {group: {} for group in plan}
    # At temperature 0 the answers end where they end; above, all have the same number of tokens.
    stop = () if args.temperature else tokenizer.stop
    if args.temperature == 0:  # a plain run is known beforehand at temperature 0 only
        for group, calibration in by_group(ids["calibration"], each).items():
            drafts, Ks = plan[group]
            known = [known_continuation(target, p, stop, most_tokens, Ks) for p in calibration]
            predictions[group] = {
                (name, K): predict(target, known, drafters[name], K, one_pass)
                for name, K in itertools.product(drafts, Ks)
            }

    chosen = by_group(ids["measured"], each)
    runs = sum(len(chosen[g]) * (1 + len(Ks) * (1 + len(d))) for g, (d, Ks) in plan.items())
    configurations = []
    with tqdm(total=runs, desc="measuring", unit="run", file=sys.stderr) as bar:
        for group, (drafts, Ks) in plan.items():
            of_group = {name: drafters[name] for name in drafts}
            results = [
                measure_prompt(
                    target, p, stop, of_group, Ks, bar.update, max_new_tokens=most_tokens,
                    temperature=args.temperature,
                )
                for p in chosen[group]
            ]  # fmt: skip
            facts = group, args.target or "default"
            configurations += [
                configuration(*facts, name, results, Ks, predictions[group], v) for name in drafts
            ]
    for c in configurations:
        show(c)
    report = dict(
        version=minispec.__version__, machine=machine(), bandwidth_gb_s=rates["bound"],
        bandwidth=rates, plain_tokens_per_second=configurations[0]["plain_tokens_per_second"],
        temperature=args.temperature, configurations=configurations,
        verification=dict(
            one_row_ms=1e3 * one_pass[1], auto={str(T): x for T, x in v.items()},
            ways_ms=getattr(target.backend.linear, "milliseconds", None),
        ),
    )  # fmt: skip
    if args.json:
        minispec.write_json(args.json, rounded(report))
    if not sys.stdout.isatty():  # for programs: a person has the table, and --json
        print("\n" + json.dumps(rounded(report)))


def main(argv: Sequence[str] | None = None) -> int:
    say = minispec.Parser(prog="bench.py", description="What speculation gains here, and why.")
    say.add_argument("--quick", action="store_true", help="less of everything, under a minute")
    say.add_argument("--full", action="store_true", help="every K from 1 to 8")
    say.add_argument("--verification", action="store_true", help="only v(T), plain and in tiles")
    say.add_argument("--target", metavar="DIR_OR_ID", help="checkpoint folder or hub id")
    say.add_argument("--draft", metavar="DIR_OR_ID|ngram", help="only this one, or this chain")
    say.add_argument("--temperature", type=float, default=0.0, help="above 0: no predictions")
    say.add_argument("--prompts", type=Path, default=PROMPTS, metavar="FILE")
    say.add_argument("--json", metavar="FILE", help="also write the figures there")
    return minispec.guard("bench.py", lambda: dispatch(say.parse_args(argv)))


def dispatch(args: argparse.Namespace):
    return verification(args) if args.verification else bench(args)


if __name__ == "__main__":
    sys.exit(main())
