"""Tokens and speed against Hugging Face transformers, on the default target's folder.

    pip install torch transformers      # CPU builds will do
    python tests/compare_transformers.py

21 prompts x 64 tokens, greedy, float32, as many threads on both sides. Compared up to the first
difference: plain and speculative (prompt lookup) decoding of ours, `generate` of theirs; and the
logits of every position. The programs take turns, prompt by prompt; rates leave out the first
token, whose pass holds the prompt, on both sides. Not part of the test suite: it needs torch.
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


class FirstToken(transformers.generation.streamers.BaseStreamer):
    """Notes when the first new token is there: the prompt itself comes first."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def theirs(hf, prompt):  # -> tokens, tokens a second after the first
    watch, ids = FirstToken(), torch.tensor([prompt])
    with torch.inference_mode():
        out = hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=N, do_sample=False,
            streamer=watch,
        )  # fmt: skip
    tokens = out[0, len(prompt) :].tolist()
    return tokens, (len(tokens) - 1) / (watch.times[-1] - watch.times[1])


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
    target, tokenizer, _ = minispec.load_pair(None, "none")
    from weights.fetch import resolve

    hf = transformers.AutoModelForCausalLM.from_pretrained(resolve(), dtype=torch.float32)
    groups = json.loads(Path(minispec.__file__).with_name("prompts.json").read_text())["measured"]
    texts = [minispec.EXAMPLE, *(text for texts in groups.values() for text in texts), *MORE]
    rates, worst, differing = {"plain": [], "lookup": [], "transformers": []}, 0.0, 0
    for text in texts:
        prompt = tokenizer.chat(text)
        expected, rate = theirs(hf, prompt)
        rates["transformers"].append(rate)
        for name, draft in (("plain", None), ("lookup", minispec.PromptLookup())):
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
    print(f"{len(texts)} prompts x {N} tokens: {differing} of {2 * len(texts)} outputs differ")
    print(f"largest difference of a logit: {worst:.1e}")
    for name, r in rates.items():
        ratio = statistics.median(a / b for a, b in zip(r, rates["transformers"]))
        print(f"{name:13} {statistics.median(r):6.1f} tokens/s, {ratio:.2f} x transformers")


if __name__ == "__main__":
    main()
