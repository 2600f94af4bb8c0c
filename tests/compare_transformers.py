"""Tokens and speed against Hugging Face transformers, on the default target's folder.

    pip install torch transformers      # CPU builds will do
    python tests/compare_transformers.py

bench.py's measured prompts and nine more, 64 tokens each, greedy, float32, as many threads on both
sides. Compared up to the first difference: plain and speculative decoding of ours (prompt lookup;
the default chain), `generate` of theirs, plain and with its own prompt lookup (K = 4 as ours, and
its usual 10); and the logits of every position. The programs take turns, prompt by prompt; rates
leave out the tokens of the first pass, which holds the prompt, on both sides. Not part of the test
suite: it needs torch.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import minispec

N = 64
MORE = [
    "What is the capital of France?", "Name three uses of copper.", "Why is the sea salty?",
    "Write a haiku about rain.", "Explain recursion to a child.", "How do bees make honey?",
    "Give me a recipe for pancakes.", "What does a compiler do?",
]  # fmt: skip


class Watch(transformers.generation.streamers.BaseStreamer):
    """Notes when tokens come and how many: the prompt itself, then those of each pass."""

    def __init__(self):
        self.times, self.counts = [], []

    def put(self, value):
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self):
        pass


def theirs(hf, prompt, **options):  # -> tokens, tokens a second after the first pass
    watch, ids = Watch(), torch.tensor([prompt])
    with torch.inference_mode():
        out = hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=N, do_sample=False,
            streamer=watch, **options,
        )  # fmt: skip
    tokens = out[0, len(prompt) :].tolist()
    return tokens, sum(watch.counts[2:]) / (watch.times[-1] - watch.times[1])


def ours(target, prompt, stop, draft):
    answer = minispec.run(target, prompt, draft, 4, max_new_tokens=N, stop=stop)
    after = len(answer.tokens) - len(answer.rounds[0].tokens)
    return answer.tokens, after / (answer.seconds - answer.first_round)


def best_two_apart(target, tokens):
    """How far apart the two best logits are after `tokens`: small means a near-tie."""
    best = np.sort(target(tokens, target.new_cache(len(tokens)), rows=1)[0])[-2:]
    return float(best[1] - best[0])


def main():
    torch.set_num_threads(os.cpu_count())
    target, tokenizer, chain = minispec.load_pair()
    from weights.fetch import resolve

    hf = transformers.AutoModelForCausalLM.from_pretrained(resolve(), dtype=torch.float32)
    groups = json.loads(Path(minispec.__file__).with_name("prompts.json").read_text())["measured"]
    texts = [minispec.EXAMPLE, *(text for texts in groups.values() for text in texts), *MORE]
    drafts = {"plain": None, "prompt lookup": minispec.PromptLookup(), "default chain": chain}
    lookups = {f"transformers, prompt lookup {K}": K for K in (4, 10)}
    rates: dict = {name: [] for name in ("transformers", *lookups, *drafts)}
    worst, differing = 0.0, 0
    for text in texts:
        prompt = tokenizer.chat(text)
        expected, rate = theirs(hf, prompt)
        rates["transformers"].append(rate)
        for name, K in lookups.items():
            rates[name].append(theirs(hf, prompt, prompt_lookup_num_tokens=K)[1])
        for name, draft in drafts.items():
            tokens, rate = ours(target, prompt, tokenizer.stop, draft)
            rates[name].append(rate)
            if tokens != expected:
                at = next((i for i, (a, b) in enumerate(zip(tokens, expected)) if a != b), None)
                differing += 1
                gap = best_two_apart(target, prompt + tokens[:at])
                print(f"{name}, {text[:40]!r}: differs at token {at}, best logits {gap:.1e} apart")
        whole = prompt + expected
        with torch.inference_mode():
            logits = hf(torch.tensor([whole])).logits[0].numpy()
        mine = target(whole, target.new_cache(len(whole)), rows=len(whole))
        worst = max(worst, float(np.abs(mine - logits).max()))
    outputs = len(drafts) * len(texts)
    print(f"{len(texts)} prompts x {N} tokens: {differing} of {outputs} outputs differ")
    print(f"largest difference of a logit: {worst:.1e}")
    for name, r in rates.items():
        ratio = statistics.median(a / b for a, b in zip(r, rates["transformers"]))
        print(f"{name:30} {statistics.median(r):6.1f} tokens/s, {ratio:.2f} x transformers")
    best = [max(pair) for pair in zip(*(rates[name] for name in lookups))]
    chain_ratio = statistics.median(a / b for a, b in zip(rates["default chain"], best))
    print(f"default chain {chain_ratio:.2f} x the better of transformers' prompt lookups")


if __name__ == "__main__":
    main()
