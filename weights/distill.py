"""Step one of a draft for the default target: the target writes its own training text.

    pip install torch transformers      # CPU builds will do; or the extra `distill`
    python weights/distill.py text --minutes 60

A conversation is a short opener, finished as a user's turn by the target at temperature 1, then its
answer at one of the temperatures of ANSWERS. Nothing but the target goes in: no data set. Token ids
are stored as uint16, TOKENS_A_SHARD at a time, in weights/draft/text/; a run that is killed loses
at most one shard, the next run goes on with the next one and its own seed. The prompts of bench.py
begin as such requests do ("Write a Python function that"); none of them is in the text on purpose.

What this file does not do yet: train a draft from the text.

Letters: B conversations at a time, T tokens of each so far, V vocabulary.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
TEXT = HERE / "draft" / "text"
ANSWERS = (0.0, 0.3, 0.6, 0.8, 1.0)  # temperatures; bench.py and most users ask at low ones
BATCH, LONGEST, TOKENS_A_SHARD = 96, 360, 100_000
OPENERS = """
Explain|Explain why|Explain how|Explain the difference between|What is|What are the|Why do
Why is|How do I|How does|How can I|Can you|Could you help me|Tell me about|Tell me a story about
Write a|Write a short story about|Write a poem about|Write a Python function that
Write a program|Write a letter to|Write an email|Write a class|Give me|Give me tips for
Give an example of|List|List five|Describe|Describe the|Compare|Summarise|Summarise this text:
Rewrite|Rewrite this sentence:|Translate|Correct the grammar:|I want to|I need|I have a|I am
My friend|Please|Show me how to|Show me an example of|Create a|Design|Suggest|Recommend|Who was
When did|Where is|Which|Is it|Should I|What happens when|What would|How many|Solve|Calculate|If
Imagine|Help me|Fix this code:|In Python,|How do I write a loop|How would you|Define|Name
Make a list of|Make a plan for|Repeat|The|A|Hello
"""


def write_conversations(model, tokenizer, rng) -> list[list[int]]:
    """BATCH conversations of the target with itself, cut at LONGEST tokens.

    All rows advance together; a row's forced tokens (the template's, the opener's) take the place
    of draws, so rows of different lengths need no padding.
    """
    import torch

    end, turn = 2, tokenizer.encode("\n<|im_start|>assistant\n", add_special_tokens=False).ids
    head = tokenizer.encode(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\n", add_special_tokens=False,
    ).ids  # fmt: skip
    openers = [opener for line in OPENERS.split("\n") for opener in line.split("|") if opener]
    forced = [
        tokenizer.encode(str(rng.choice(openers)), add_special_tokens=False).ids
        for _ in range(BATCH)
    ]
    rows, turns = [list(head) for _ in range(BATCH)], [0] * BATCH
    warmth = np.ones(BATCH)
    cache, fed = None, torch.tensor(rows)
    while len(rows[0]) < LONGEST and sum(t == 2 for t in turns) < 0.9 * BATCH:
        out = model(fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        drawn = draw(out.logits[:, -1].numpy(), warmth, rng)
        for b in range(BATCH):
            x = forced[b].pop(0) if forced[b] else int(drawn[b])
            rows[b].append(x)
            if x == end and turns[b] < 2:
                turns[b] += 1
                forced[b], warmth[b] = list(turn), rng.choice(ANSWERS)
        fed = torch.tensor([[row[-1]] for row in rows])
    return [cut(row, len(head), end) for row in rows]


def draw(logits, temperature, rng):  # [B, V], [B] -> [B]
    """One token a row by the Gumbel-max trick; temperature 0 is the argmax."""
    exponential = rng.standard_exponential(logits.shape, dtype=np.float32)
    gumbel = -np.log(np.maximum(exponential, 1e-30))  # a float32 exponential can be exactly 0
    return np.argmax(logits + temperature[:, None].astype(np.float32) * gumbel, axis=-1)


def cut(row: list[int], start: int, end: int) -> list[int]:
    """The row up to and including its second turn's end, if it has one.

    >>> cut([2, 5, 2, 6, 2, 7], start=1, end=2)
    [2, 5, 2, 6, 2]
    """
    ends = [i for i in range(start, len(row)) if row[i] == end]
    return row[: ends[1] + 1] if len(ends) > 1 else row


def save_shard(number: int, conversations: list[list[int]]):
    """ids and the beginnings of conversations; written beside, then renamed."""
    TEXT.mkdir(parents=True, exist_ok=True)
    lengths = np.array([len(c) for c in conversations], np.uint16)
    ids = np.concatenate(conversations).astype(np.uint16)
    unfinished = TEXT / f".{number:04}.npz"
    np.savez_compressed(unfinished, ids=ids, lengths=lengths)
    unfinished.rename(TEXT / f"{number:04}.npz")


def write_text(minutes: float):
    import torch
    import transformers
    from tokenizers import Tokenizer

    sys.path.insert(0, str(HERE.parent))
    from weights.fetch import resolve

    folder, started = resolve(), time.monotonic()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    number = len(list(TEXT.glob("[0-9]*.npz")))
    rng, pending, total = np.random.default_rng([7, number]), [], 0
    with torch.inference_mode():
        while time.monotonic() - started < 60 * minutes:
            pending += write_conversations(model, tokenizer, rng)
            size = sum(map(len, pending))
            seconds = time.monotonic() - started
            print(f"{total + size} tokens, {(total + size) / seconds:.0f} tokens/s", flush=True)
            if size >= TOKENS_A_SHARD:
                save_shard(number, pending)
                number, pending, total = number + 1, [], total + size
                rng = np.random.default_rng([7, number])
    if pending:
        save_shard(number, pending)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Write training text for a draft.")
    parser.add_argument("step", choices=["text"])
    parser.add_argument("--minutes", type=float, default=60)
    args = parser.parse_args(argv)
    write_text(args.minutes)


if __name__ == "__main__":
    main()
