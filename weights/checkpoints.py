"""Pairs of checkpoints that share a tokenizer: the memory they need, and the c to expect.

    python weights/checkpoints.py

prints the table of the README, computed from the numbers of each config.json that are repeated
below. Memory is that of float32 weights, draft and target together. c is expected to be the ratio
of the bytes that a pass reads, which holds where memory is the limit; a small model does worse.

What this file does not do: download anything, or know of other checkpoints than these.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import model


def gpt2(layers, width, heads):
    return dict(model_type="gpt2", n_layer=layers, n_embd=width, n_head=heads, vocab_size=50257,
                n_positions=1024, layer_norm_epsilon=1e-5)  # fmt: skip


def llama(layers, width, heads, kv_heads, hidden, vocab, context, theta, tied, **more):
    return dict(
        dict(model_type="llama", rms_norm_eps=1e-5), num_hidden_layers=layers, hidden_size=width,
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=hidden,
        vocab_size=vocab, max_position_embeddings=context, rope_theta=theta,
        tie_word_embeddings=tied, **more,
    )  # fmt: skip


def smollm2(layers, width, heads, kv_heads, hidden, theta=1e5):
    return llama(layers, width, heads, kv_heads, hidden, 49152, 8192, theta, True)


def llama3(layers, width, heads, hidden, tied, factor, head_dim):
    rope = dict(rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192)  # fmt: skip
    return llama(layers, width, heads, 8, hidden, 128256, 131072, 5e5, tied, head_dim=head_dim,
                 rope_scaling=rope)  # fmt: skip


def qwen2(layers, width, heads, kv_heads, hidden, tied, vocab=151936):
    more = dict(model_type="qwen2", rms_norm_eps=1e-6, use_sliding_window=False,
                sliding_window=32768)  # fmt: skip
    return llama(layers, width, heads, kv_heads, hidden, vocab, 32768, 1e6, tied) | more


def qwen3(layers, width, heads, hidden, tied):
    more = dict(model_type="qwen3", rms_norm_eps=1e-6, head_dim=128, attention_bias=False,
                use_sliding_window=False, sliding_window=None)  # fmt: skip
    return llama(layers, width, heads, 8, hidden, 151936, 40960, 1e6, tied) | more


def mistral(vocab):
    more = dict(model_type="mistral", sliding_window=None)
    return llama(32, 4096, 32, 8, 14336, vocab, 32768, 1e6, False) | more


CONFIGS = {
    "distilbert/distilgpt2": gpt2(6, 768, 12),
    "openai-community/gpt2": gpt2(12, 768, 12),
    "openai-community/gpt2-medium": gpt2(24, 1024, 16),
    "openai-community/gpt2-large": gpt2(36, 1280, 20),
    "openai-community/gpt2-xl": gpt2(48, 1600, 25),
    "HuggingFaceTB/SmolLM2-135M-Instruct": smollm2(30, 576, 9, 3, 1536),
    "HuggingFaceTB/SmolLM2-360M-Instruct": smollm2(32, 960, 15, 5, 2560),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": smollm2(24, 2048, 32, 32, 8192, 1.3e5),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": llama(22, 2048, 32, 4, 5632, 32000, 2048, 1e4, False),
    "meta-llama/Llama-3.2-1B-Instruct": llama3(16, 2048, 32, 8192, True, 32.0, 64),
    "meta-llama/Llama-3.2-3B-Instruct": llama3(28, 3072, 24, 8192, True, 32.0, 128),
    "meta-llama/Llama-3.1-8B-Instruct": llama3(32, 4096, 32, 14336, False, 8.0, 128),
    "Qwen/Qwen2.5-0.5B-Instruct": qwen2(24, 896, 14, 2, 4864, True),
    "Qwen/Qwen2.5-1.5B-Instruct": qwen2(28, 1536, 12, 2, 8960, True),
    "Qwen/Qwen2.5-3B-Instruct": qwen2(36, 2048, 16, 2, 11008, True),
    "Qwen/Qwen2.5-7B-Instruct": qwen2(28, 3584, 28, 4, 18944, False, 152064),
    "Qwen/Qwen3-0.6B": qwen3(28, 1024, 16, 3072, True),
    "Qwen/Qwen3-1.7B": qwen3(28, 2048, 16, 6144, True),
    "Qwen/Qwen3-4B": qwen3(36, 2560, 32, 9728, True),
    "Qwen/Qwen3-8B": qwen3(36, 4096, 32, 12288, False),
    "mistralai/Mistral-7B-Instruct-v0.3": mistral(32768),
}

PAIRS = [
    ("distilbert/distilgpt2", "openai-community/gpt2-xl"),
    ("openai-community/gpt2", "openai-community/gpt2-large"),
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct"),
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"),
    ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
    ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct"),
    ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
    ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B"),
    ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"),
]


def shapes(raw: dict, only_read: bool = False) -> dict[str, tuple[int, ...]]:
    """Name in the file -> shape there, of every weight; or of those that each pass reads whole."""
    family = model.FAMILIES[raw["model_type"]]
    config, found = family.config(raw), {}
    for name, pattern, letters in family.weights:
        looked_up = name == "positions" or (name == "embed" and "head" not in config.absent)
        if name in config.absent or (only_read and looked_up):
            continue
        shape = tuple(config.size(d) for d in letters.removesuffix("T").split())
        for l in range(config.layers if "{l}" in pattern else 1):
            found[pattern.format(l=l)] = shape
    return found


def numbers(raw: dict, only_read: bool = False) -> int:
    """How many numbers those are."""
    return sum(map(math.prod, shapes(raw, only_read).values()))


def main():
    print("| target | draft | memory, GB | expected c |\n|---|---|---|---|")
    for draft, target in PAIRS:
        d, t = CONFIGS[draft], CONFIGS[target]
        gigabytes, c = 4e-9 * (numbers(d) + numbers(t)), numbers(d, True) / numbers(t, True)
        print(f"| {target} | {draft} | {gigabytes:.1f} | {c:.2f} |")


if __name__ == "__main__":
    main()
