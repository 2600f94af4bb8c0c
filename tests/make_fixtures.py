"""Makes tests/data/oracles/: tiny random Hugging Face checkpoints and the logits they must give.

    python tests/make_fixtures.py        # all, a few seconds; a second run writes the same bytes

Needs torch and transformers, which the tests themselves do not: the folders are stored in the
repository. They were made with Python 3.11, torch 2.13.0, transformers 5.24.0, safetensors 0.8.0
and NumPy 2.4.6, on one CPU thread. Each folder holds

    config.json           as a real checkpoint of that kind has it (keys, spellings, omissions)
    model.safetensors     random weights (or shards and model.safetensors.index.json)
    oracle.npz            tokens [T]; rows [R], the positions kept; logits [R, V] in float64

The logits come from `AutoModelForCausalLM.from_pretrained(folder)`, eager attention, on the values
the file stores. Everything a wrong reader could miss is made visible:
- every dimension of a fixture has a number of its own, where the family allows it;
- norms are not one, biases are not zero, epsilons are large, rope thetas are not the default;
- keys that a reader must skip hold values that would do harm (rotary_emb.inv_freq, attn.bias);
- a sliding window that is switched off is shorter than the sequence.
"""

import json
import os
import shutil
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).parent / "data" / "oracles"
LIMIT = 2_000_000  # bytes, all fixtures together

# --- configs: as found in real folders, with small numbers ------------------------------------

GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
    "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "initializer_range": 0.02,
    "layer_norm_epsilon": 2e-3, "bos_token_id": 50, "eos_token_id": 50,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
    "initializer_range": 0.02, "rms_norm_eps": 2e-3, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
QWEN = {
    "hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02,
    "rms_norm_eps": 3e-3, "bos_token_id": 60, "eos_token_id": 61, "use_cache": True,
    "use_sliding_window": False,
}  # fmt: skip
QWEN2 = QWEN | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = QWEN | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def gpt2_shape(V, context, D, H, L):
    return {"vocab_size": V, "n_positions": context, "n_embd": D, "n_head": H, "n_layer": L}


def shape(V, context, D, H, F, L, **more):
    """The keys the Llama-like families share; more: num_key_value_heads, head_dim, ..."""
    return {
        "vocab_size": V, "max_position_embeddings": context, "hidden_size": D,
        "num_attention_heads": H, "intermediate_size": F, "num_hidden_layers": L,
    } | more  # fmt: skip


def llama3(original, **more):
    return {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": original, "rope_type": "llama3",
    } | more  # fmt: skip


# Positions kept of a long sequence: both ends, and around the original context of 61 or 59.
FAR = [0, 1, 29, 58, 59, 60, 61, 62, 97, 150, 211, 250, 299, 300]

FIXTURES = {
    # As the hub's gpt2: no prefix, no n_inner, masks stored as tensors. Tokens fill the context.
    "gpt2": dict(
        config=GPT2 | gpt2_shape(V=53, context=37, D=15, H=3, L=2) | {"n_ctx": 37},
        tokens=37, prefix=False, mask=torch.float32,
    ),
    # As older exports: the prefix, a head that repeats the embedding, masks of another type.
    "gpt2_prefix": dict(
        config=GPT2 | gpt2_shape(V=59, context=43, D=14, H=7, L=3) | {"n_inner": 41},
        tokens=29, mask=torch.uint8, extra_head=True,
    ),
    "gpt2_n_inner_null": dict(
        config=GPT2 | gpt2_shape(V=61, context=31, D=10, H=2, L=3)
        | {"n_inner": None, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True},
        tokens=23,
    ),
    "gpt2_untied": dict(
        config=GPT2 | gpt2_shape(V=67, context=41, D=12, H=4, L=2) | {"tie_word_embeddings": False},
        tokens=19,
    ),
    # As the first Llama: no num_key_value_heads, no rope keys, inv_freq stored in every layer.
    "llama_mha": dict(
        config=LLAMA | shape(V=61, context=47, D=18, H=3, F=29, L=2)
        | {"pretraining_tp": 1, "rope_scaling": None, "torch_dtype": "float32"},
        tokens=31, inv_freq=True,
    ),
    # transformers 5 writes the file: theta only inside rope_parameters, every key spelled out.
    "llama_gqa": dict(
        config=LLAMA | shape(V=67, context=53, D=24, H=6, F=31, L=3)
        | {"num_key_value_heads": 2, "head_dim": 10, "rope_parameters": {
            "rope_type": "default", "rope_theta": 500000.0}},
        tokens=37, written_by_transformers=True,
    ),
    "llama_legacy_theta": dict(
        config=LLAMA | shape(V=59, context=53, D=20, H=2, F=23, L=3, num_key_value_heads=1)
        | {"head_dim": None, "rope_theta": 700.0, "rope_scaling": None, "mlp_bias": False},
        tokens=29,
    ),
    # As Llama 3.2: tied, llama3 scaling beside a top-level theta; far past the original context.
    "llama3_legacy": dict(
        config=LLAMA | shape(V=71, context=487, D=15, H=3, F=37, L=2, num_key_value_heads=1)
        | {"head_dim": 14, "tie_word_embeddings": True, "rope_theta": 500000.0,
           "rope_scaling": llama3(61)},
        tokens=301, rows=FAR,
    ),
    "llama3": dict(
        config=LLAMA | shape(V=53, context=461, D=12, H=4, F=31, L=3, num_key_value_heads=2)
        | {"head_dim": 16, "rope_parameters": llama3(59, rope_theta=10000.0)},
        tokens=301, rows=FAR, written_by_transformers=True,
    ),
    "llama_linear_legacy": dict(
        config=LLAMA | shape(V=59, context=173, D=28, H=2, F=37, L=3, num_key_value_heads=1)
        | {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        tokens=101, rows=[0, 1, 2, 30, 31, 47, 64, 99, 100],
    ),
    "llama_linear": dict(
        config=LLAMA | shape(V=61, context=89, D=21, H=7, F=29, L=2, num_key_value_heads=1)
        | {"head_dim": 8, "rope_parameters": {
            "rope_type": "linear", "factor": 2.5, "rope_theta": 300.0}},
        tokens=31,
    ),
    "llama_attention_bias": dict(
        config=LLAMA | shape(V=59, context=43, D=20, H=4, F=23, L=3, num_key_value_heads=2)
        | {"attention_bias": True, "mlp_bias": False, "head_dim": 6, "rope_theta": 5000.0},
        tokens=29,
    ),
    "llama_mlp_bias": dict(
        config=LLAMA | shape(V=61, context=41, D=20, H=5, F=17, L=2, num_key_value_heads=1)
        | {"attention_bias": False, "mlp_bias": True, "rope_theta": 5000.0},
        tokens=23,
    ),
    "llama_tied": dict(
        config=LLAMA | shape(V=73, context=43, D=18, H=3, F=23, L=2, num_key_value_heads=1)
        | {"tie_word_embeddings": True, "rope_theta": 5000.0},
        tokens=19,
    ),
    "llama_tied_extra_head": dict(
        config=LLAMA | shape(V=71, context=43, D=18, H=3, F=23, L=2, num_key_value_heads=1)
        | {"tie_word_embeddings": True, "rope_theta": 5000.0},
        tokens=19, extra_head=True,
    ),
    "llama_float16": dict(
        config=LLAMA | shape(V=67, context=41, D=20, H=2, F=31, L=3, num_key_value_heads=1)
        | {"rope_theta": 5000.0, "torch_dtype": "float16"},
        tokens=19, dtype=torch.float16,
    ),
    "llama_bfloat16": dict(
        config=LLAMA | shape(V=71, context=37, D=20, H=2, F=29, L=3, num_key_value_heads=1)
        | {"rope_theta": 5000.0, "torch_dtype": "bfloat16"},
        tokens=19, dtype=torch.bfloat16,
    ),
    "llama_sharded": dict(
        config=LLAMA | shape(V=61, context=37, D=18, H=3, F=31, L=2, num_key_value_heads=1)
        | {"rope_theta": 5000.0},
        tokens=19, shards=3,
    ),
    # Mistral's own format lies beside the shards in real folders; the index does not name it.
    "mistral": dict(
        config=LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        | shape(V=73, context=59, D=24, H=6, F=31, L=2, num_key_value_heads=3)
        | {"sliding_window": None, "rope_theta": 1000000.0},
        tokens=29, shards=2, consolidated=True,
    ),
    # As Qwen2.5: no attention_bias key, although q, k and v have one; a window switched off.
    "qwen2": dict(
        config=QWEN2 | shape(V=79, context=61, D=32, H=4, F=23, L=3, num_key_value_heads=2)
        | {"rope_theta": 1000000.0, "sliding_window": 7, "max_window_layers": 1,
           "tie_word_embeddings": False, "torch_dtype": "float32"},
        tokens=29,
    ),
    "qwen2_tied": dict(
        config=QWEN2 | shape(V=83, context=53, D=30, H=3, F=19, L=2, num_key_value_heads=1)
        | {"rope_theta": 1000000.0, "sliding_window": 5, "max_window_layers": 0,
           "tie_word_embeddings": True},
        tokens=31, dtype=torch.bfloat16,
    ),
    "qwen3": dict(
        config=QWEN3 | shape(V=71, context=53, D=17, H=6, F=29, L=3, num_key_value_heads=2)
        | {"head_dim": 10, "attention_bias": False, "rope_theta": 1000000, "rope_scaling": None,
           "sliding_window": None, "max_window_layers": 3, "tie_word_embeddings": False},
        tokens=31,
    ),
    "qwen3_tied": dict(
        config=QWEN3 | shape(V=67, context=47, D=19, H=4, F=23, L=3, num_key_value_heads=2)
        | {"head_dim": 14, "attention_bias": False, "tie_word_embeddings": True,
           "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        tokens=31, written_by_transformers=True,
    ),
    "qwen3_attention_bias": dict(
        config=QWEN3 | shape(V=73, context=43, D=13, H=3, F=31, L=2, num_key_value_heads=1)
        | {"head_dim": 8, "attention_bias": True, "rope_theta": 1000000.0,
           "sliding_window": None, "max_window_layers": 2, "tie_word_embeddings": False},
        tokens=23,
    ),
}  # fmt: skip


# --- weights ------------------------------------------------------------------------------------


def random_weights(config, rng):
    """{HF name: float32 tensor}, every tensor random; norms around one, all else around zero."""
    weights = {}
    for name, t in sorted(AutoModelForCausalLM.from_config(config).state_dict().items()):
        values = 0.3 * rng.standard_normal(tuple(t.shape))
        is_norm = t.ndim == 1 and name.endswith("weight")
        weights[name] = torch.from_numpy((values + is_norm).astype(np.float32))
    return weights


def stored_weights(config, weights, rng, *, dtype, prefix, mask, inv_freq, extra_head):
    """The same weights as this kind of file names and stores them, with the keys to be skipped."""
    stored = {name: t.to(dtype) for name, t in weights.items()}
    if config.tie_word_embeddings:
        del stored["lm_head.weight"]
    for i in range(config.num_hidden_layers):
        if mask is not None:
            T, attn = config.max_position_embeddings, f"transformer.h.{i}.attn"
            stored[f"{attn}.bias"] = torch.ones(1, 1, T, T).tril().to(mask)
            stored[f"{attn}.masked_bias"] = torch.tensor(-1e4)
        if inv_freq:
            wrong = torch.from_numpy(rng.random(config.head_dim // 2).astype(np.float32))
            stored[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = wrong
    if extra_head:
        embedding = "transformer.wte" if config.model_type == "gpt2" else "model.embed_tokens"
        stored["lm_head.weight"] = stored[f"{embedding}.weight"].clone()
    if not prefix:
        stored = {name.removeprefix("transformer."): t for name, t in stored.items()}
    return stored


def save_shards(folder, stored, n):
    """n files, the tensors dealt out in turn, and the index that says where each one is."""
    names = sorted(stored)
    weight_map = {}
    for s in range(n):
        file = f"model-{s + 1:05}-of-{n:05}.safetensors"
        part = {name: stored[name] for name in names[s::n]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(t.numel() * t.element_size() for t in stored.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


# --- logits -------------------------------------------------------------------------------------


class Float64(TorchFunctionMode):
    """Gives float64 where Hugging Face's code asks for float32 by name.

    A model loaded in float64 still computes its norms, softmax and rotation angles in float32: good
    to 1e-6 only. With this the same code is good to 1e-14.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(x):
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


def hf_logits(folder, tokens, dtype):  # [T] -> [T, V]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens[None])).logits[0].numpy()


def oracle(folder, tokens):  # [T] -> [T, V]
    """Logits in float64 throughout; must agree with the untouched model up to float32 rounding."""
    with Float64():
        logits = hf_logits(folder, tokens, torch.float64)
    assert logits.dtype == np.float64
    gap = np.abs(logits - hf_logits(folder, tokens, torch.float32)).max()
    assert gap < 1e-4 * np.abs(logits).max(), f"{folder.name}: float32 is {gap} away from float64"
    return logits


# --- one fixture --------------------------------------------------------------------------------


def assert_numbers_differ(c, tokens):
    """Two dimensions of one size would let a wrong axis pass. G may equal H (plain attention)."""
    H, D = c.num_attention_heads, c.hidden_size
    G = getattr(c, "num_key_value_heads", H)
    C = getattr(c, "head_dim", None) or D // H
    F = getattr(c, "intermediate_size", None) or getattr(c, "n_inner", None) or 4 * D
    sizes = {"T": tokens, "D": D, "H": H, "C": C, "F": F, "L": c.num_hidden_layers,
             "V": c.vocab_size} | ({"G": G} if G != H else {})  # fmt: skip
    assert len(set(sizes.values())) == len(sizes), sizes


def make(name, config, tokens, *, rows=None, written_by_transformers=False, shards=0,
         consolidated=False, dtype=torch.float32, prefix=True, mask=None, inv_freq=False,
         extra_head=False):  # fmt: skip
    """Writes FOLDER/name. tokens: how many; rows: the positions kept, all if None."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rng = np.random.default_rng(list(name.encode()))

    write_json(folder / "config.json", config)
    hf_config = AutoConfig.from_pretrained(folder)
    assert_numbers_differ(hf_config, tokens)
    if written_by_transformers:
        hf_config.save_pretrained(folder)
    stored = stored_weights(
        hf_config, random_weights(hf_config, rng), rng,
        dtype=dtype, prefix=prefix, mask=mask, inv_freq=inv_freq, extra_head=extra_head,
    )  # fmt: skip
    if shards:
        save_shards(folder, stored, shards)
    else:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    if consolidated:
        save_file({"norm.weight": torch.zeros(2)}, folder / "consolidated.safetensors")

    ids = rng.integers(hf_config.vocab_size, size=tokens)
    rows = np.arange(tokens) if rows is None else np.array(rows)
    np.savez(folder / "oracle.npz", tokens=ids, rows=rows, logits=oracle(folder, ids)[rows])
    return sum(f.stat().st_size for f in folder.iterdir())


def main():
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    sizes = {name: make(name, **fixture) for name, fixture in FIXTURES.items()}
    for name, size in sizes.items():
        print(f"{name:24}{size:9,}")
    print(f"{'together':24}{sum(sizes.values()):9,} bytes, limit {LIMIT:,}")
    assert sum(sizes.values()) < LIMIT, f"{sum(sizes.values())} bytes >= {LIMIT}"


if __name__ == "__main__":
    main()
