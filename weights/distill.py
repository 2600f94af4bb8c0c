"""Train the draft of the default target from nothing but the target. (Extra `distill`: torch.)

    python weights/distill.py text --minutes 60     # the target writes the training text
    python weights/distill.py train --minutes 55    # a draft learns; ends in weights/draft/
    python weights/distill.py evaluate              # held-out acceptance per position

Both long steps save as they go and continue when run again; training counts CPU time, so that it
can be stopped and continued while something else is being timed. A draft that has been trained to
its end goes through another cycle, on whatever text there is by then.

The recipe. Text: openers, some with a topic, finished as a user's turn by the target at temperature
0.8, then its answer at one of TEMPERATURES; the target's states are kept. Draft: one layer of the
target's shape over (token, target's state one token back), the idea of EAGLE (Li et al. 2024, arXiv
2401.15077), begun from the target's last layer; a head over the HEAD most frequent tokens (FR-Spec,
Zhao et al. 2025, arXiv 2502.14856), begun from the embedding's rows. Loss: cross-entropy to the
target's distribution over those tokens, twice the total variation, half the smooth L1 distance to
the target's state. The first half learns from true states; the second also from the draft's own
outputs, two tokens further (as HASS, Zhang et al. 2024, arXiv 2408.15766), which is what holds up
the later proposals. Muon for the matrices, AdamW for the head and the norms, cosine. A later cycle
is all of the second kind, at half the rate.

What was run, and what came out: weights/draft/README.md.

What this file does not do: other targets, other kinds of draft, more than one machine.

Letters: B rows at a time, T tokens, S tokens seen, D width, V vocabulary of the target.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import model as numpy_model  # noqa: E402
from weights.fetch import resolve  # noqa: E402

TEXT = HERE / "draft" / "text"
CHECKPOINT = HERE / "draft" / "checkpoint.pt"
STOP = 2  # the target's <|im_end|>
OPEN = 1  # <|im_start|>

# ---------------------------------------------------------------- the target, in torch


class Target:
    """The default target's forward pass: products in bfloat16, the residual stream in float32."""

    def __init__(self):
        folder = resolve()
        loaded = numpy_model.load(folder, numpy_model.numpy_backend(way="plain"))
        self.c, self.tokenizer = loaded.config, numpy_model.Tokenizer(folder)
        half = lambda w: torch.from_numpy(w).to(torch.bfloat16)  # noqa: E731
        self.layers = [{k: half(w) for k, w in layer.items()} for layer in loaded.weights["layers"]]
        self.embed = half(loaded.weights["embed"])
        self.norm = torch.from_numpy(loaded.weights["norm"].copy())
        self.inv_freq = torch.tensor(self.c.inv_freq)

    def new_cache(self, rows: int, most: int):
        c = self.c
        shape = c.layers, 2, rows, c.kv_heads, most, c.head_dim
        return torch.zeros(shape, dtype=torch.bfloat16)

    def __call__(self, ids, position: int, cache, mask):
        """Feed T tokens a row, ids [B, T], at `position`, under a mask [B, 1, T or 1, S].

        Returns the states after the final norm, [B, T, D] float32.
        """
        c, (B, T) = self.c, ids.shape
        S, group = position + T, c.heads // c.kv_heads
        x = self.embed[ids].float()
        angle = torch.arange(position, S)[:, None] * self.inv_freq
        cos, sin = (f.bfloat16().tile(2) for f in (angle.cos(), angle.sin()))
        for l, w in enumerate(self.layers):
            heads = F.linear(rms_norm(x, w["attn_norm"], c.eps), w["qkv"])
            heads = heads.view(B, T, -1, c.head_dim).transpose(1, 2)
            qk, v = heads[:, : c.heads + c.kv_heads], heads[:, c.heads + c.kv_heads :]
            qk = rotate(qk, cos, sin)
            k_all, v_all = cache[l, 0, :, :, :S], cache[l, 1, :, :, :S]
            k_all[:, :, position:], v_all[:, :, position:] = qk[:, c.heads :], v
            q = qk[:, : c.heads].reshape(B, c.kv_heads, group * T, c.head_dim)
            scores = q @ k_all.transpose(-1, -2) * c.head_dim**-0.5
            scores = (scores.view(B, c.kv_heads, group, T, S) + mask[:, None]).softmax(-1)
            out = scores.view(B, c.kv_heads, group * T, S) @ v_all
            out = out.view(B, c.heads, T, c.head_dim).transpose(1, 2).reshape(B, T, -1)
            x = x + F.linear(out, w["o"])
            gate, up = F.linear(rms_norm(x, w["mlp_norm"], c.eps), w["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w["down"])
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + c.eps) * self.norm

    def logits(self, states):  # [..., D] -> [..., V]
        return F.linear(states.bfloat16(), self.embed).float()


def rms_norm(x, weight, eps):  # float32 [..., D] -> bfloat16
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).bfloat16() * weight


def rotate(x, cos, sin):  # [B, H, T, C], [T, C], [T, C]
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


# ---------------------------------------------------------------- the target writes

ROWS, STEPS, LONGEST_CONVERSATION = 192, 512, 316
USER = 0.8  # temperature
TEMPERATURES, SHARES = (0.0, 0.3, 0.6, 0.8, 1.0), (0.45, 0.1, 0.15, 0.1, 0.2)

# Openers alone, or with a topic or a task; then the target finishes the user's turn, unless the
# sentence is ended for it. No prompt of bench.py is among them.
OPENERS = (
    """
Explain|Explain why|Explain how|Explain the difference between|What is|What are the|Why do|Why is
How do I|How does|How can I|Can you|Could you help me|Tell me about|Tell me a story about|Write a
Write a short story about|Write a poem about|Write a letter to|Write an email|Give me
Give me tips for|Give an example of|List|List five|Describe|Describe the|Compare|Summarise
Summarise this text:|Rewrite|Rewrite this sentence:|Translate|Correct the grammar:|I want to
I need|I have a|I am|My friend|Please|Show me how to|Show me an example of|Create a|Design|Suggest
Recommend|Who was|When did|Where is|Which|Is it|Should I|What happens when|What would|How many
Solve|Calculate|If|Imagine|Help me|Fix this code:|In Python,|How do I write a loop|How would you
Define|Name|Make a list of|Make a plan for|Repeat|The|A|Hello|Write a Python function that
Write a program|Write a class
""".strip()
    .replace("\n", "|")
    .split("|")
)
ASKING = (
    """
Explain|Explain in simple words|Tell me about|Describe|Give me five facts about
Write a paragraph about|What is interesting about|Why is it good to know about
What should I know about|Write a short story about|Write a poem about|Write an essay on
Give a short introduction to|How would you teach a child about|List some questions about
What are the advantages and disadvantages of|Give me advice about
Write an email to my colleague about|What are the main ideas behind|Tell me a funny story about
What is the history of|What is|How does one start with|What do people often get wrong about
""".strip()
    .replace("\n", "|")
    .split("|")
)
TOPICS = (
    """
volcanoes|the moon|photosynthesis|bread|jazz|chess|gravity|bees|the Roman Empire|electric cars
sleep|coffee|inflation|the ocean|dinosaurs|vaccines|solar power|gardening|robots
the printing press|bicycles|time management|public speaking|dreams|rivers|the human heart
black holes|recycling|the internet|maps|friendship|learning the piano|saving money|a lost dog
a dragon who is afraid of fire|an old bridge|a train at night|winter|mountains|rainbows|magnets
sound|light|atoms|DNA|evolution|bacteria|the brain|memory|habits|stress|yoga|running|swimming
cooking pasta|soup|cheese|chocolate|tea|fishing|sailing|airplanes|rockets|Mars|comets|the sun
tides|earthquakes|storms|snow|deserts|rain forests|wolves|elephants|whales|birds|spiders|ants
trees|flowers|mushrooms|farming|food waste|cities|bridges|castles|museums|painting|photography
poetry|novels|theatre|films|music|drums|guitars|dancing|football|tennis|the Olympics|democracy
elections|laws|taxes|banks|trade|work from home|meetings|teamwork|leadership|a new job|school
homework|exams|teachers|mathematics|prime numbers|fractions|geometry|probability|statistics
algorithms|databases|computer networks|encryption|passwords|machine learning|video games
smartphones|privacy|social media|newspapers|languages|Spanish|Latin|writing|letters|libraries
a birthday|weddings|travel|a trip to Japan|camping|hiking|trains|traffic|ships|lighthouses|islands
pirates|knights|a clever fox|a brave girl|two brothers|a secret door|a talking cat|a small village
a king without a crown|the future|energy|wind turbines|nuclear power|batteries|steel|glass|paper
plastic|water|ice|fire|salt|sugar|vitamins|exercise|headaches|the flu|teeth|eyes|skin|babies
old age|pets|cats|dogs|horses|patience
""".strip()
    .replace("\n", "|")
    .split("|")
)
CODING = (
    """
Write a Python function that|Write Python code that|Show me a Python example that
Can you write a Python function that|I need a short program that|Write a JavaScript function that
Write a Python script that|How can I write a function that
Write and explain a Python function that
""".strip()
    .replace("\n", "|")
    .split("|")
)
TASKS = (
    """
returns the largest number of a list|reverses a string|computes a factorial|adds two numbers
finds the smallest and the largest value|checks if a number is prime|computes Fibonacci numbers
counts the words in a text|removes duplicates from a list|merges two dictionaries
reads a text file|writes lines to a file|converts Celsius to Fahrenheit
computes the average of a list|sums the even numbers|finds the common elements of two lists
flattens a nested list|sorts words by their length|checks if two words are anagrams
converts a number to binary|prints a multiplication table|simulates a dice roll
generates a random password|validates an email address|parses a date|downloads a web page
counts how often each letter occurs|implements a stack|implements a queue|implements binary search
implements bubble sort|computes the greatest common divisor|draws a triangle of stars
splits a list into chunks|rotates a list|finds the second largest number|transposes a matrix
multiplies two matrices|solves a quadratic equation|keeps a shopping list|models a car
models a student|logs messages with a timestamp|retries a function that fails
measures how long a function takes|capitalises every word|replaces spaces by underscores
finds the longest word|groups names by first letter|builds a simple calculator
plays a guessing game|converts JSON to a table|counts lines in a folder
""".strip()
    .replace("\n", "|")
    .split("|")
)


def opener(rng) -> tuple[str, bool]:
    """The beginning of a user's turn, and whether it is a whole one."""
    kind, whole = rng.random(), bool(rng.random() < 0.6)
    if kind < 0.25:
        return str(rng.choice(OPENERS)), False
    if kind < 0.65:
        asking = str(rng.choice(ASKING))
        end = ("?" if asking.startswith(("What", "Why", "How")) else ".") if whole else ""
        return f"{asking} {rng.choice(TOPICS)}{end}", whole
    return f"{rng.choice(CODING)} {rng.choice(TASKS)}{'.' if whole else ''}", whole


class Conversation:
    """One row: what was fed, what is forced next, and at which temperature it goes on."""

    def __init__(self, tokenizer, rng, start: int):
        text, whole = opener(rng)
        ids = tokenizer.chat(text)
        end = len(ids) - ids[::-1].index(STOP) - 1  # of the user's turn
        self.head, self.answer = ids[:end], ids[end:]
        self.forced = list(ids if whole else self.head)
        self.longest = len(self.head) + int(rng.integers(4, 50))  # a longer user's turn is cut
        self.low = float(rng.choice(TEMPERATURES, p=SHARES))
        self.asked, self.temperature = whole, self.low if whole else USER
        self.start, self.ids = start, []

    def next(self, drawn: int) -> int:
        """The token to feed: a forced one, else the one drawn from the target."""
        x, n = self.forced.pop(0) if self.forced else drawn, len(self.ids)
        if not self.asked and n >= len(self.head) and (x == STOP or n >= self.longest):
            x, *self.forced = self.answer
            self.asked, self.temperature = True, self.low
        self.ids.append(x)
        return x

    @property
    def over(self) -> bool:
        ended = self.asked and not self.forced and self.ids[-1] == STOP
        return ended or len(self.ids) > LONGEST_CONVERSATION


def draw(logits, temperature, rng):  # [B, V], [B] -> [B]
    """One token a row by inverting the cumulative distribution; temperature 0 is the argmax."""
    x = logits.argmax(-1)
    warm = torch.nonzero(temperature > 0)[:, 0]
    if len(warm):
        cumulative = (logits[warm] / temperature[warm, None]).softmax(-1).cumsum(-1)
        u = torch.from_numpy(rng.random((len(warm), 1), np.float32)) * cumulative[:, -1:]
        found = torch.searchsorted(cumulative, u, right=True)[:, 0]
        x[warm] = found.clamp(max=logits.shape[-1] - 1)
    return x


def write_conversations(target: Target, rng) -> list[tuple[list[int], np.ndarray]]:
    """Conversations of the target with itself: ids [n] and states [n - 1, D] float16.

    All rows advance together, STEPS steps; a row whose conversation ends begins another, which
    does not see the one before it. What is unfinished at the end is kept as it is.
    """
    cache = target.new_cache(ROWS, STEPS)
    states = np.empty((ROWS, STEPS, target.c.width), np.float16)
    rows = [Conversation(target.tokenizer, rng, 0) for _ in range(ROWS)]
    mask = torch.zeros(ROWS, 1, 1, STEPS, dtype=torch.bfloat16)
    fed, done = torch.tensor([[r.next(0)] for r in rows]), []

    def finish(b, position):
        done.append((rows[b].ids, states[b, rows[b].start : position].copy()))

    for position in range(STEPS - 1):
        x = target(fed, position, cache, mask[..., : position + 1])[:, 0]
        states[:, position] = x.numpy()
        temperature = torch.tensor([r.temperature for r in rows])
        drawn = draw(target.logits(x), temperature, rng)
        for b, row in enumerate(rows):
            if row.over:
                finish(b, position)  # its last token was just fed in vain
                rows[b] = row = Conversation(target.tokenizer, rng, position + 1)
                mask[b, 0, 0, : position + 1] = -torch.inf
            fed[b, 0] = row.next(int(drawn[b]))
    for b, row in enumerate(rows):
        if len(row.ids) > 60:
            finish(b, STEPS - 1)
    return done


def save_shard(number: int, conversations: list):
    """ids and lengths, compressed; the states beside them in a file that git ignores."""
    TEXT.mkdir(parents=True, exist_ok=True)
    ids = np.concatenate([ids for ids, _ in conversations]).astype(np.uint16)
    lengths = np.array([len(ids) for ids, _ in conversations], np.uint16)
    states = np.zeros((len(ids), conversations[0][1].shape[1]), np.float16)
    for start, (_, s) in zip(np.cumsum(lengths, dtype=int) - lengths, conversations):
        states[start : start + len(s)] = s
    np.save(TEXT / f"{number:04}.states.npy", states)
    unfinished = TEXT / f".{number:04}.npz"
    np.savez_compressed(unfinished, ids=ids, lengths=lengths)
    unfinished.rename(TEXT / f"{number:04}.npz")


def write_text(minutes: float):
    target, started, total = Target(), time.monotonic(), 0
    number = len(list(TEXT.glob("[0-9]*.npz")))
    with torch.inference_mode():
        while time.monotonic() - started < 60 * minutes:
            conversations = write_conversations(target, np.random.default_rng([7, number]))
            save_shard(number, conversations)
            number, total = number + 1, total + sum(len(ids) for ids, _ in conversations)
            seconds = time.monotonic() - started
            print(f"{total} tokens, {total / seconds:.0f} tokens/s", flush=True)


# ---------------------------------------------------------------- the draft learns

HEAD, BATCH, ROLLOUT = 8192, 8, 3
MUON_RATE, ADAM_RATE = 5e-3, 1e-3
WEIGHT_OF_USER_TURN = 0.15


class Text:
    """The conversations of all shards, with the target's states; every 25th is held out."""

    def __init__(self, target: Target):
        self.ids, self.states, self.train, self.held_out = [], [], [], []
        for path in sorted(TEXT.glob("[0-9]*.npz")):
            shard, states_file = np.load(path), path.with_suffix(".states.npy")
            if not states_file.is_file():  # git has only the ids
                print(f"computing the states of {path.name}", flush=True)
                np.save(states_file, states_of(target, shard["ids"], shard["lengths"]))
            states = np.load(states_file, mmap_mode="r")
            ends = np.cumsum(shard["lengths"], dtype=int)
            for start, end in zip([0, *ends[:-1]], ends):
                if end - start > 40:
                    part = self.held_out if len(self.ids) % 25 == 0 else self.train
                    part.append(len(self.ids))
                    self.ids.append(shard["ids"][start:end].astype(np.int64))
                    self.states.append(states[start:end])

    def batch(self, rows):
        """ids [B, T], states [B, T, D], weight [B, T] of the prediction made at each token."""
        T = max(len(self.ids[i]) for i in rows)
        ids = np.full((len(rows), T), STOP)
        states = np.zeros((len(rows), T, self.states[0].shape[1]), np.float32)
        weight = np.zeros((len(rows), T), np.float32)
        for b, i in enumerate(rows):
            n, opened = len(self.ids[i]), np.flatnonzero(self.ids[i] == OPEN)
            ids[b, :n], states[b, :n] = self.ids[i], self.states[i]
            weight[b, opened[1] + 3 : n - 1] = WEIGHT_OF_USER_TURN
            if len(opened) > 2:
                weight[b, opened[2] + 2 : n - 1] = 1
        return torch.from_numpy(ids), torch.from_numpy(states), torch.from_numpy(weight)


@torch.inference_mode()
def states_of(target: Target, ids, lengths) -> np.ndarray:  # [tokens], [conversations]
    """The target's states [tokens, D] float16, each conversation on its own."""
    states = np.empty((len(ids), target.c.width), np.float16)
    for end, n in zip(np.cumsum(lengths, dtype=int), lengths.tolist()):
        row = torch.from_numpy(ids[end - n : end].astype(np.int64))[None]
        causal = torch.full((n, n), -torch.inf, dtype=torch.bfloat16).triu(1)[None, None]
        states[end - n : end] = target(row, 0, target.new_cache(1, n), causal)[0].numpy()
    return states


class Draft(torch.nn.Module):
    """One layer of the target's shape over (embedding of a token, target's state one token back).

    Its output stands for the target's state at the token; a head over the HEAD most frequent
    tokens of the text turns it into logits.
    """

    def __init__(self, target: Target, head_ids):
        super().__init__()
        self.c, D = target.c, target.c.width
        last = target.layers[-1]
        parameter = lambda w: torch.nn.Parameter(w.float().clone())  # noqa: E731
        self.embed_norm, self.state_norm = (torch.nn.Parameter(torch.ones(D)) for _ in range(2))
        self.join = torch.nn.Parameter(torch.cat([torch.eye(D), torch.eye(D)], dim=1))
        for name in "attn_norm", "qkv", "o", "mlp_norm", "gate_up", "down":
            setattr(self, name, parameter(last[name]))
        self.norm, self.head = parameter(target.norm), parameter(target.embed[head_ids])
        self.register_buffer("head_ids", torch.as_tensor(head_ids), persistent=False)
        angle = torch.arange(1024)[:, None] * target.inv_freq
        self.cos, self.sin = angle.cos().tile(2), angle.sin().tile(2)

    def norm_of(self, x, weight):
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.c.eps) * weight

    def rollout(self, embedded, states, steps: int):
        """Predicted states [B, T, D], once for each of `steps`.

        Step 1 reads the target's states. Step j reads, one token back, what step j - 1 predicted
        there; its keys and values of the last j - 1 tokens are those of steps 2..j, further back
        those of step 1: what a drafter has that is j - 1 proposals past the last verified token.
        """
        (B, T, _), c = embedded.shape, self.c
        back = F.pad(states, (0, 0, 1, 0))[:, :T]
        e, G, group = self.norm_of(embedded, self.embed_norm), c.kv_heads, c.heads // c.kv_heads
        causal = torch.full((T, T), -torch.inf).triu(1)
        keys, values, outputs = [], [], []
        for step in range(steps):
            x = F.linear(torch.cat([e, self.norm_of(back, self.state_norm)], dim=-1), self.join)
            heads = F.linear(self.norm_of(x, self.attn_norm), self.qkv)
            heads = heads.view(B, T, -1, c.head_dim).transpose(1, 2)
            qk = rotate(heads[:, : c.heads + G], self.cos[:T], self.sin[:T])
            q = qk[:, : c.heads].view(B, G, group, T, c.head_dim) * c.head_dim**-0.5
            keys.append(qk[:, c.heads :, None])
            values.append(heads[:, c.heads + G :, None])
            # Step 1's keys up to `step` tokens back, then one key of each later step.
            seen = causal if step == 0 else torch.full((T, T), -torch.inf).triu(1 - step)
            scores = [q @ keys[0].transpose(-1, -2) + seen]
            late = [(delayed(keys[i], step - i), delayed(values[i], step - i))
                    for i in range(1, step + 1)]  # fmt: skip
            scores += [(q * k).sum(-1, keepdim=True) for k, _ in late]
            weights = torch.cat(scores, dim=-1).float().softmax(-1)
            out = weights[..., :T].to(q.dtype) @ values[0]
            for i, (_, v) in enumerate(late):
                out = out + weights[..., T + i : T + i + 1].to(q.dtype) * v
            out = out.reshape(B, c.heads, T, c.head_dim).transpose(1, 2).reshape(B, T, -1)
            x = x + F.linear(out, self.o)
            gate, up = F.linear(self.norm_of(x, self.mlp_norm), self.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, self.down)
            back = self.norm_of(x, self.norm)
            outputs.append(back)
            back = F.pad(back, (0, 0, 1, 0))[:, :T]
        return outputs


def delayed(x, tokens: int):  # [..., T, C] -> the same, `tokens` later, zeros before
    return F.pad(x, (0, 0, tokens, 0))[..., : x.shape[-2], :]


def losses(draft, target, batch, steps):
    """Cross-entropy to the target's distribution over the head's tokens, twice the total variation
    of the two, half the smooth L1 distance of the states; averaged over the steps."""
    ids, states, weight = batch
    p = F.linear(states.bfloat16(), target.embed[draft.head_ids]).float().log_softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = draft.rollout(target.embed[ids], states, steps)
    total, chosen = 0.0, weight > 0
    w, p, true = weight[chosen] / weight.sum(), p[chosen], states[chosen]
    prob = p.exp()
    for step, out in enumerate(outputs):
        x = out[chosen]
        with torch.autocast("cpu", torch.bfloat16):
            z = F.linear(x, draft.head)
        q = z.float().log_softmax(-1)
        entropy = -(prob * q).sum(-1)
        variation = 0.5 * (prob - q.exp()).abs().sum(-1)
        distance = F.smooth_l1_loss(x.float(), true, reduction="none").mean(-1)
        total = total + (w * (entropy + 2 * variation + 0.5 * distance)).sum() * 0.9**step
    return total / sum(0.9**i for i in range(steps))


@torch.no_grad()
def acceptance(draft, target, text, steps=4, rows=48, temperatures=(0.0, 1.0)) -> dict:
    """Held-out, on answers: temperature -> per step the mean of sum min(p, q)."""
    shared, count = {t: np.zeros(steps) for t in temperatures}, 0
    for i in range(0, min(rows, len(text.held_out)), 8):
        ids, states, weight = text.batch(text.held_out[i : i + 8])
        chosen = weight == 1
        z = target.logits(states[chosen])
        with torch.autocast("cpu", torch.bfloat16):
            outputs = draft.rollout(target.embed[ids], states, steps)
        for step, out in enumerate(outputs):
            with torch.autocast("cpu", torch.bfloat16):
                guess = F.linear(out[chosen], draft.head).float()
            for t, total in shared.items():
                if t == 0:
                    same = draft.head_ids[guess.argmax(-1)] == z.argmax(-1)
                    total[step] += same.sum().item()
                else:
                    p = (z / t).softmax(-1)[:, draft.head_ids]
                    total[step] += torch.minimum(p, (guess / t).softmax(-1)).sum().item()
        count += len(z)
    return {t: (total / count).round(3).tolist() for t, total in shared.items()}


def frequent_ids(text: Text, vocab: int) -> np.ndarray:
    """The HEAD tokens that are most frequent in the text, in ascending order."""
    counts = np.bincount(np.concatenate([text.ids[i] for i in text.train]), minlength=vocab)
    return np.sort(np.argsort(-counts, kind="stable")[:HEAD])


def train(minutes: float):
    """A cycle of `minutes` of both cores, or the rest of one; then the folder is written."""
    target = Target()
    text = Text(target)
    saved = torch.load(CHECKPOINT) if CHECKPOINT.is_file() else {}
    step, done, cycle = saved.get("step", 0), saved.get("done", 0.0), saved.get("cycle", 0)
    if done >= 1:
        done, cycle = 0.0, cycle + 1
    torch.manual_seed(step)
    rng, order = np.random.default_rng([1, step]), []
    head_ids = saved["head_ids"] if saved else torch.from_numpy(frequent_ids(text, target.c.vocab))
    draft = Draft(target, head_ids)
    matrices = {n: w for n, w in draft.named_parameters() if w.ndim == 2 and n != "head"}
    others = [w for n, w in draft.named_parameters() if n not in matrices]
    optimisers = {
        torch.optim.Muon(
            list(matrices.values()), momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        ): MUON_RATE,
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0): ADAM_RATE,
    }
    if saved:
        draft.load_state_dict(saved["draft"])
        for optimiser, state in zip(optimisers, saved.get("optimisers", [])):
            optimiser.load_state_dict(state)
    before, began, reported = done, time.process_time(), time.process_time()

    def save():
        states = [optimiser.state_dict() for optimiser in optimisers]
        new = dict(step=step, done=done, cycle=cycle, head_ids=head_ids, optimisers=states)
        torch.save(new | {"draft": draft.state_dict()}, CHECKPOINT.with_suffix(".tmp"))
        CHECKPOINT.with_suffix(".tmp").rename(CHECKPOINT)

    first = step
    while done < 1:
        order = order or batches(text, rng)
        wave = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done))
        for optimiser, rate in optimisers.items():
            optimiser.zero_grad()
            for group in optimiser.param_groups:
                group["lr"] = rate * wave * min(1, (step - first + 1) / 50) * (0.5 if cycle else 1)
        steps = ROLLOUT if cycle or done >= 0.5 else 1
        loss = losses(draft, target, text.batch(order.pop()), steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        step, done = step + 1, before + (time.process_time() - began) / (120 * minutes)
        if time.process_time() - reported > 12 * minutes:
            reported = time.process_time()
            print(f"{done:4.0%} step {step}, {acceptance(draft, target, text)}", flush=True)
            save()
    save()
    export()


def batches(text: Text, rng) -> list:
    """One pass over the text: lists of BATCH conversations of like length, in random order."""
    shuffled, found = rng.permutation(text.train), []
    for a in range(0, len(shuffled), 16 * BATCH):
        group = sorted(shuffled[a : a + 16 * BATCH], key=lambda i: len(text.ids[i]))
        found += [group[i : i + BATCH] for i in range(0, len(group), BATCH)]
    rng.shuffle(found)
    return found


def evaluate():
    target = Target()
    text = Text(target)
    saved = torch.load(CHECKPOINT)
    draft = Draft(target, saved["head_ids"])
    draft.load_state_dict(saved["draft"])
    print(acceptance(draft, target, text, rows=200, temperatures=(0.0, 0.6, 1.0)))


def export():
    """The checkpoint as a folder that model.load_draft reads: weights/draft/, float16."""
    saved, raw = torch.load(CHECKPOINT), numpy_model.read_json(resolve() / "config.json")
    c = numpy_model.llama_config(raw)
    w = {name: value.detach().to(torch.float16).numpy() for name, value in saved["draft"].items()}
    q, k = c.heads * c.head_dim, c.kv_heads * c.head_dim
    tensors = {
        "embed_norm.weight": w["embed_norm"], "state_norm.weight": w["state_norm"],
        "join.weight": w["join"], "norm.weight": w["norm"], "lm_head.weight": w["head"],
        "lm_head.ids": saved["head_ids"].numpy().astype(np.float32),
    }  # fmt: skip
    layer = {
        "input_layernorm": w["attn_norm"], "post_attention_layernorm": w["mlp_norm"],
        "self_attn.q_proj": w["qkv"][:q], "self_attn.k_proj": w["qkv"][q : q + k],
        "self_attn.v_proj": w["qkv"][q + k :], "self_attn.o_proj": w["o"],
        "mlp.gate_proj": w["gate_up"][: c.hidden], "mlp.up_proj": w["gate_up"][c.hidden :],
        "mlp.down_proj": w["down"],
    }  # fmt: skip
    tensors |= {f"layers.0.{key}.weight": np.ascontiguousarray(W) for key, W in layer.items()}
    config = raw | dict(
        architectures=["minispec.StateDraft"], model_type="minispec_draft", num_hidden_layers=1,
        head_size=len(saved["head_ids"]),
        target=dict(
            layers=c.layers, width=c.width, heads=c.heads, kv_heads=c.kv_heads, hidden=c.hidden,
            vocab=c.vocab,
        ),
    )  # fmt: skip
    (HERE / "draft" / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    safetensors.numpy.save_file(tensors, HERE / "draft" / "model.safetensors")


def main(argv=None):
    parser = argparse.ArgumentParser(description="Train the draft of the default target.")
    parser.add_argument("step", choices=["text", "train", "evaluate"])
    parser.add_argument("--minutes", type=float, default=60)
    args = parser.parse_args(argv)
    if args.step == "evaluate":
        evaluate()
    else:
        {"text": write_text, "train": train}[args.step](args.minutes)


if __name__ == "__main__":
    main()
