"""The forward pass, the loop and their speed on a GPU, in one command and without a network.

    python tests/check_gpu.py --json gpu.json     # every backend that is installed and has a GPU
    python tests/check_gpu.py --cpu --small       # torch on the CPU: tries out the script itself

Correct: logits of the tiny checkpoints against NumPy's, greedy ids with prompt lookup, logits after
a rollback, and the law of sampled texts. Fast: v(T), tokens a second and the bandwidth bound, on
random weights of a 1B model's shape (no such model is loaded; what is printed of it says
"synthetic"), and speculative against plain decoding there with the acceptance that is forced.

What is not installed, or has no GPU, is left out with its reason. Not part of the test suite.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import bench  # noqa: E402
import minispec  # noqa: E402
import model  # noqa: E402

FOLDER = ROOT / "tests" / "data" / "oracles"
MODELS = sorted(p.name for p in FOLDER.iterdir() if (p / "config.json").is_file())
PROMPT = [1, 2, 3, 1, 2]
WAYS = [("cupy", "cuda"), ("torch", "cuda"), ("torch", "mps")]
DTYPES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}  # and their largest logit error


def greedy(target, draft=None):
    rounds = minispec.generate(target, PROMPT, draft, 4, max_new_tokens=24)
    return [x for r in rounds for x in r.tokens]


def check_logits(backend) -> float:
    """The largest difference to NumPy's logits, in units of the largest logit."""
    worst = 0.0
    for name in MODELS:
        pair = [model.load(FOLDER / name, b) for b in (model.numpy_backend(way="plain"), backend)]
        for tokens, keep in ([*PROMPT, 7, 8], 5), ([*PROMPT, 4], 6):
            ours, theirs = (m(tokens, m.new_cache(8), rows=3) for m in pair)
            worst = max(worst, float(np.max(np.abs(ours - theirs)) / np.max(np.abs(ours))))
            cache = pair[1].new_cache(8)
            pair[1]([*PROMPT, 9, 9], cache, rows=1)
            cache.truncate(keep - 1)
            again = pair[1](tokens[:keep], cache, rows=1)[0]
            whole = pair[1](tokens[:keep], pair[1].new_cache(8), rows=1)[0]
            worst = max(worst, float(np.max(np.abs(again - whole)) / np.max(np.abs(ours))))
    return worst


def check_greedy(backend) -> int:
    """How many of the tiny checkpoints give other ids than on NumPy, or other ones with a draft."""
    differ = 0
    for name in MODELS:
        ours = greedy(model.load(FOLDER / name, model.numpy_backend(way="plain")))
        target = model.load(FOLDER / name, backend)
        differ += greedy(target) != ours or greedy(target, minispec.PromptLookup()) != ours
    return differ


def check_law(backend, texts: int = 2000) -> float:
    """p-value: the second sampled token of speculative texts against the law of the first two."""
    target = model.load(FOLDER / "llama_tied", backend)
    draft = minispec.ModelDraft(model.first_layers(target, 1))
    options = dict(max_new_tokens=2, temperature=0.3, top_k=4)
    found = Counter()
    for seed in range(texts):
        rounds = minispec.generate(
            target, PROMPT, draft, 2, randomness=minispec.Randomness(seed), **options
        )
        found[tuple(x for r in rounds for x in r.tokens)] += 1
    exact = model.load(FOLDER / "llama_tied", model.numpy_backend("float64"))
    law = minispec.sampling_law(0.3, 4, 1.0)
    row = lambda tokens: law(exact(tokens, exact.new_cache(8), rows=1)[0])  # noqa: E731
    expected = {}
    for x in np.flatnonzero(first := row(PROMPT)):
        for y in np.flatnonzero(second := row([*PROMPT, int(x)])):
            expected[int(x), int(y)] = texts * first[x] * second[y]
    if set(found) - set(expected):
        return 0.0
    gap = lambda counts: sum((counts[k] - e) ** 2 / e for k, e in expected.items())  # noqa: E731
    rng, keys = np.random.default_rng(0), list(expected)
    shares = np.array([expected[k] for k in keys]) / texts
    draws = (dict(zip(keys, rng.multinomial(texts, shares))) for _ in range(999))
    return (1 + sum(gap(counts) >= gap(found) for counts in draws)) / 1000


def forced(n: int):
    """A verification rule that accepts n proposals whatever they are: for timing only."""
    return lambda proposals, p, q, randomness: (min(n, len(proposals)), int(np.argmax(p[-1])))


def rate(target, draft, K, rule, tokens) -> float:
    answer = minispec.run(target, PROMPT, draft, K, max_new_tokens=tokens, verify=rule)
    return bench.decoding_rate(answer)


def speed(backend, layers: int, tokens: int) -> dict:
    target = bench.synthetic(backend, layers)
    draft = minispec.ModelDraft(model.first_layers(target, max(1, layers // 8)))
    rates = bench.bandwidth(target, repeats=5)
    (times,) = bench.pass_seconds([target], range(1, 18))
    turns = [(rate(target, None, 0, minispec.token_rule, tokens),
              rate(target, draft, 4, forced(3), tokens)) for _ in range(3)]  # fmt: skip
    plain, speculative = np.median(turns, axis=0)
    return dict(
        synthetic=f"{layers} layers of a 1B model, random weights", one_row_ms=1e3 * times[1],
        v={T: times[T] / times[1] for T in times}, bytes=rates["bytes"],
        share_of_bound=rates["bytes"] / 1e9 / rates["bound"] / times[1],
        products_gb_s=rates["products"],
        plain_tokens_per_second=plain, speculative_tokens_per_second=speculative,
        speedup_at_3_of_4_forced=speculative / plain,
    )  # fmt: skip


def check(name: str, device: str, dtype: str, args) -> dict:
    started = time.perf_counter()
    backend = model.BACKENDS[name](dtype, device)
    found = dict(backend=backend.name, logit_error=check_logits(backend))
    if dtype == "float32":
        found |= dict(greedy_differ=check_greedy(backend), law_p=check_law(backend))
    found |= speed(backend, 2 if args.small else 16, 24 if args.small else 96)
    found["passed"] = (
        found["logit_error"] <= DTYPES[dtype]
        and not found.get("greedy_differ")
        and found.get("law_p", 1.0) > 1e-3
    )
    return found | {"seconds": time.perf_counter() - started}


def main() -> int:
    say = minispec.Parser(prog="check_gpu.py", description=__doc__.split("\n")[0])
    say.add_argument("--cpu", action="store_true", help="torch on the CPU instead")
    say.add_argument("--small", action="store_true", help="fewer layers and tokens")
    say.add_argument("--json", metavar="FILE", help="also write the figures there")
    return minispec.guard("check_gpu.py", lambda: run(say.parse_args()))


def run(args: argparse.Namespace) -> int:
    minispec.check_writable(args.json)
    found = []
    for name, device in [("torch", "cpu")] if args.cpu else WAYS:
        for dtype in ("float32",) if args.cpu else DTYPES:
            try:
                found.append(check(name, device, dtype, args))
            except (ImportError, ValueError) as error:
                print(f"left out: {name}, {device}, {dtype}: {error}")
                continue
            for key, value in bench.rounded(found[-1]).items():
                print(f"{key:32} {value}")
            print()
    if args.json:
        report = dict(version=minispec.__version__, machine=bench.machine(), checks=found)
        minispec.write_json(args.json, bench.rounded(report))
    if not found:
        print("nothing was checked: no backend with a GPU is here (--cpu tries out the script)")
    return 0 if all(f["passed"] for f in found) else 1


if __name__ == "__main__":
    sys.exit(main())
