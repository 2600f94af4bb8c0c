"""Contract: a checkpoint folder becomes exactly the model that its files describe, or one error.

    load(folder) is right, or raises   FileNotFoundError   a file is missing: which one
                                       MemoryError         the model is larger than the machine
                                       ValueError          damaged, not implemented, or unlike its
                                                           config.json: file, key, and both values

Never a model of zeros, never a guess, never another exception. Each error is one line.

The first part compares numbers that were computed elsewhere (bit patterns, rotary frequencies) or
that a hand can compute (one layer in which all but one product is switched off). The second part
damages a checkpoint in every way we have seen or could think of. Whole logits of every family are
test_oracles.py's subject. B numbers are rows of the bug reports that these tests come from.
"""

import builtins
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_oracles import FOLDER, logits_of, read_safetensors, write_safetensors

import model

BILLION = 10**9
DTYPE_NAMES = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "<u2": "BF16"}  # bfloat16: as bits

# One head count, width and vocabulary for every hand-made model; D = H C where nothing else is
# said, so that the output projection can be the identity.
CONFIG = dict(
    model_type="llama", vocab_size=7, hidden_size=8, num_attention_heads=4, num_key_value_heads=2,
    head_dim=2, intermediate_size=3, num_hidden_layers=1, max_position_embeddings=31,
    tie_word_embeddings=True,
)  # fmt: skip


# --- tools ----------------------------------------------------------------------------------------


def copy_of(name, folder):
    """A copy of one of the small checkpoints of test_oracles.py, to be damaged."""
    return Path(shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True))


def edit(folder, *absent, **changes):
    """Change keys of config.json, or take them out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in absent}))
    return folder


def save_tensors(path, tensors):
    header, data = {}, b""
    for key, x in tensors.items():
        start, data = len(data), data + x.tobytes()
        offsets = [start, len(data)]
        header[key] = dict(
            dtype=DTYPE_NAMES[x.dtype.str], shape=list(x.shape), data_offsets=offsets
        )
    write_safetensors(path, header, data)


def llama_tensors(c, biases=()):
    """Random float32 tensors of a one-layer Llama, under their names in a file."""
    D, F, C = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    rows = {"q": c["num_attention_heads"] * C}
    rows["k"] = rows["v"] = c["num_key_value_heads"] * C
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], D), "model.norm.weight": (D,)}
    layer = {
        "input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,),
        "self_attn.o_proj.weight": (D, rows["q"]), "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D), "mlp.down_proj.weight": (D, F),
    }  # fmt: skip
    layer |= {f"self_attn.{x}_proj.weight": (n, D) for x, n in rows.items()}
    layer |= {f"self_attn.{x}_proj.bias": (rows[x],) for x in biases}
    rng = np.random.default_rng(0)
    shapes |= {f"model.layers.0.{key}": shape for key, shape in layer.items()}
    return {key: rng.normal(size=shape).astype("<f4") for key, shape in shapes.items()}


def write_checkpoint(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_tensors(folder / "model.safetensors", tensors)
    return folder


def load64(folder):
    return model.load(folder, model.numpy_backend("float64"))


def assert_refused(folder, *words, error=ValueError):
    """load(folder) raises, in one short line that has all the words."""
    with pytest.raises(error) as caught:
        model.load(folder)
    message = str(caught.value)
    assert type(caught.value) is error and "\n" not in message and len(message) < 600, message
    for word in words:
        assert str(word) in message, message


# --- numbers: what is read is what was written ----------------------------------------------------

# Bits and what they mean, from IEEE 754 and not from a library.
BITS = {
    "<u2": [(0x3F80, 1.0), (0xC049, -3.140625), (0x3DCD, 0.10009765625), (0x7F80, np.inf),
            (0x8000, -0.0), (0x0001, 2.0**-133), (0x4000, 2.0), (0x0000, 0.0)],
    "<f2": [(0x3C00, 1.0), (0xC248, -3.140625), (0x2E68, 0.10009765625), (0x7C00, np.inf),
            (0x8000, -0.0), (0x0001, 2.0**-24), (0x7BFF, 65504.0), (0x0000, 0.0)],
    "<f4": [(0x3F800000, 1.0), (0xC0490000, -3.140625), (0x3DCD0000, 0.10009765625),
            (0x7F800000, np.inf), (0x80000000, -0.0), (0x00000001, 2.0**-149),
            (0x3DCCCCCD, 0.100000001490116119384765625), (0, 0.0)],
}  # fmt: skip


@pytest.mark.parametrize("dtype", BITS)
def test_b43_every_type_of_number_is_read_bit_by_bit(dtype, tmp_path):
    bits, values = zip(*BITS[dtype])
    stored = np.array(bits, f"<u{dtype[-1]}").view(dtype)
    tensors = llama_tensors(CONFIG) | {"model.norm.weight": stored}
    got = model.load(write_checkpoint(tmp_path, CONFIG, tensors)).weights["norm"]
    assert got.dtype == np.float32
    assert got.tobytes() == np.array(values, np.float32).tobytes()  # bytes: -0.0 is not 0.0


def test_b43_float64_keeps_its_precision_on_a_float64_backend(tmp_path):
    values = np.array([1 / 3, -0.1, 1e-300, 1e300, 0, 1, 2, 3])
    folder = write_checkpoint(
        tmp_path, CONFIG, llama_tensors(CONFIG) | {"model.norm.weight": values}
    )
    assert load64(folder).weights["norm"].tolist() == values.tolist()


@pytest.mark.parametrize("type_name", ["I8", "F8_E4M3", "U16", "BOOL"])
def test_another_type_of_number_is_refused_by_name(type_name, tmp_path):
    path = copy_of("llama_tied", tmp_path) / "model.safetensors"
    header, data = read_safetensors(path)
    header["model.norm.weight"]["dtype"] = type_name
    write_safetensors(path, header, data)
    assert_refused(tmp_path, type_name, "model.norm.weight", path)


# --- numbers: rotary frequencies ------------------------------------------------------------------


def llama3(factor):
    return dict(
        rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip


# (head_dim, factor) -> the frequencies at some indices, at theta 5e5: those of Llama 3.1 and 3.2.
LLAMA3 = {
    (128, 8.0): {28: 3.211445995e-3, 29: 2.166570764e-3, 32: 5.248461610e-4, 34: 1.785078128e-4,
                 35: 9.556212354e-5, 63: 3.068925989e-7},
    (64, 32.0): {15: 1.290547928e-3, 16: 4.295567966e-4, 18: 1.946163818e-5},
}  # fmt: skip


@pytest.mark.parametrize("head_dim, factor", LLAMA3)
def test_b47_llama3_frequencies(head_dim, factor):
    rope = {"rope_theta": 5e5, "rope_scaling": llama3(factor)}
    got = model.rope_frequencies(rope, head_dim)
    for i, expected in LLAMA3[head_dim, factor].items():
        assert got[i] == pytest.approx(expected, rel=1e-9)


def test_b47_the_key_at_position_5000_is_turned_by_them(tmp_path):
    # Position 0 is not turned at all and would hide any fault. The cache claims 5000 tokens of
    # zeros, so that one pass over one token is enough; its key is then computed by hand.
    config = CONFIG | dict(head_dim=128, num_attention_heads=1, num_key_value_heads=1)
    config |= dict(max_position_embeddings=9000, rope_theta=5e5, rope_scaling=llama3(8.0))
    tensors = llama_tensors(config)
    m = load64(write_checkpoint(tmp_path, config, tensors))
    cache = m.new_cache(5001)
    cache.length = 5000
    m([0] * 5000 + [3], cache, rows=1)

    x = tensors["model.embed_tokens.weight"][3].astype(np.float64)
    x = x / np.sqrt(np.mean(x**2) + 1e-6) * tensors["model.layers.0.input_layernorm.weight"]
    key = tensors["model.layers.0.self_attn.k_proj.weight"].astype(np.float64) @ x  # [C]
    for i, frequency in LLAMA3[128, 8.0].items():
        turned = (key[i] + 1j * key[i + 64]) * np.exp(5000j * frequency)
        assert cache.k[0, 0, i, 5000] == pytest.approx(turned.real, abs=1e-5)
        assert cache.k[0, 0, i + 64, 5000] == pytest.approx(turned.imag, abs=1e-5)


@pytest.mark.parametrize("raw", [
    {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 1e4}},
    {"rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 1e4}, "rope_theta": 7.0},
])  # fmt: skip
def test_b47_theta_and_linear_scaling_in_every_spelling(raw):
    assert model.rope_frequencies(raw, 4) == pytest.approx((0.25, 0.0025), rel=1e-12)


# --- numbers: one product at a time ---------------------------------------------------------------


def layer_output(folder, token):
    """What the one layer adds to the token's embedding, [D]; as attention sees only itself, its
    output is the value heads."""
    m = load64(folder)
    return before_norm(m, [token])[0] - m.weights["embed"][token]


def before_norm(m, tokens):
    cache = m.new_cache(len(tokens))
    return m.layers(m.embed(tokens, cache), cache)


def normed(x, weight):
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x**2) + 1e-6) * weight


def test_b50_query_heads_share_key_heads_in_order(tmp_path):
    tensors = llama_tensors(CONFIG)
    tensors["model.layers.0.self_attn.o_proj.weight"] = np.eye(8, dtype="<f4")
    tensors["model.layers.0.mlp.down_proj.weight"][:] = 0
    tensors["model.layers.0.self_attn.v_proj.weight"][2:] = 0  # all of value head 1
    out = layer_output(write_checkpoint(tmp_path, CONFIG, tensors), token=5).reshape(4, 2)

    x = normed(
        tensors["model.embed_tokens.weight"][5], tensors["model.layers.0.input_layernorm.weight"]
    )
    value = tensors["model.layers.0.self_attn.v_proj.weight"][:2] @ x
    assert np.allclose(out, [value, value, [0, 0], [0, 0]], atol=1e-12) and abs(value).min() > 0.01


def test_b44_gpt2_matrices_are_stored_in_out_also_where_they_are_square(tmp_path):
    # c_proj is D x D: no shape tells whether it was transposed.
    D, rng = 6, np.random.default_rng(1)
    config = dict(
        model_type="gpt2", vocab_size=5, n_positions=9, n_embd=D, n_head=3, n_layer=1, n_inner=7
    )
    shapes = {
        "wte.weight": (5, D), "wpe.weight": (9, D), "ln_f.weight": (D,), "ln_f.bias": (D,),
        "h.0.ln_1.weight": (D,), "h.0.ln_1.bias": (D,),
        "h.0.attn.c_attn.weight": (D, 3 * D), "h.0.attn.c_attn.bias": (3 * D,),
        "h.0.attn.c_proj.weight": (D, D), "h.0.attn.c_proj.bias": (D,),
        "h.0.ln_2.weight": (D,), "h.0.ln_2.bias": (D,),
        "h.0.mlp.c_fc.weight": (D, 7), "h.0.mlp.c_fc.bias": (7,),
        "h.0.mlp.c_proj.weight": (7, D), "h.0.mlp.c_proj.bias": (D,),
    }  # fmt: skip
    w = {key: rng.normal(size=shape).astype("<f4") for key, shape in shapes.items()}
    w["h.0.mlp.c_proj.weight"][:] = w["h.0.mlp.c_proj.bias"][:] = 0
    m = load64(write_checkpoint(tmp_path, config, w))
    out = before_norm(m, [4])[0]

    x = w["wte.weight"][4] + w["wpe.weight"][0].astype(np.float64)
    h = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * w["h.0.ln_1.weight"] + w["h.0.ln_1.bias"]
    v = (h @ w["h.0.attn.c_attn.weight"] + w["h.0.attn.c_attn.bias"])[2 * D :]
    x = x + v @ w["h.0.attn.c_proj.weight"] + w["h.0.attn.c_proj.bias"]
    assert np.allclose(out, x, atol=1e-12)


@pytest.mark.parametrize("change", [{"n_inner": None}, {}])
def test_b44_a_silent_n_inner_is_four_times_the_width(change):
    config = dict(vocab_size=5, n_ctx=9, n_embd=6, n_head=3, n_layer=1) | change
    assert model.gpt2_config(config).hidden == 24


def test_b45_head_dim_is_read_and_not_derived(tmp_path):
    config = CONFIG | dict(model_type="qwen3", hidden_size=16, head_dim=8, num_key_value_heads=1)
    tensors = llama_tensors(config)
    for x in "q", "k":
        tensors[f"model.layers.0.self_attn.{x}_norm.weight"] = np.ones(8, "<f4")
    m = model.load(write_checkpoint(tmp_path, config, tensors))
    assert m.config.head_dim == 8
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (32, 16)
    assert m([1, 2, 3], m.new_cache(3), rows=1).shape == (1, 7)


def test_b45_an_absent_head_dim_is_derived(tmp_path):
    folder = copy_of("llama_tied", tmp_path)  # D = 18, H = 3
    assert model.load(edit(folder, "head_dim")).config.head_dim == 6
    assert model.load(edit(folder, head_dim=None)).config.head_dim == 6


@pytest.mark.parametrize("bias", "qkv")
def test_b46_qwen2_has_biases_on_q_k_and_v_that_its_config_does_not_mention(bias, tmp_path):
    config = CONFIG | {"model_type": "qwen2"}
    tensors = llama_tensors(config, biases="qkv")
    folder = write_checkpoint(tmp_path, config, tensors)
    before = logits_of(folder, [1, 2, 3])
    key = f"model.layers.0.self_attn.{bias}_proj.bias"
    tensors[key][0] += 1
    save_tensors(folder / "model.safetensors", tensors)
    assert abs(logits_of(folder, [1, 2, 3]) - before).max() > 1e-3
    del tensors[key]
    save_tensors(folder / "model.safetensors", tensors)
    assert_refused(folder, key.removeprefix("model."), folder / "model.safetensors")


@pytest.mark.parametrize("extra_head", [False, True])
def test_b41_a_tied_model_uses_its_embedding_as_head(extra_head, tmp_path):
    tensors = llama_tensors(CONFIG)
    if extra_head:  # some files repeat it; what they hold does not count
        tensors["lm_head.weight"] = np.ones((7, 8), "<f4")
    m = load64(write_checkpoint(tmp_path, CONFIG, tensors))
    x = before_norm(m, [2, 3])
    expected = normed(x[1], tensors["model.norm.weight"]) @ tensors["model.embed_tokens.weight"].T
    assert np.allclose(m([2, 3], m.new_cache(2), rows=1)[0], expected, atol=1e-12)


def test_b41_an_untied_model_without_a_head_is_refused(tmp_path):
    config = CONFIG | {"tie_word_embeddings": False}
    folder = write_checkpoint(tmp_path, config, llama_tensors(config))
    assert_refused(folder, "lm_head.weight", folder / "model.safetensors")


# --- missing files and tensors --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_b54_a_missing_file_is_named(name, tmp_path):
    (copy_of("llama_tied", tmp_path) / name).unlink()
    assert_refused(tmp_path, tmp_path, name, error=FileNotFoundError)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    assert_refused(tmp_path / "nowhere", tmp_path / "nowhere", error=FileNotFoundError)


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_b54_a_missing_shard_is_named(shard, tmp_path):
    path = copy_of("llama_sharded", tmp_path) / f"model-0000{shard}-of-00003.safetensors"
    path.unlink()
    assert_refused(tmp_path, path, error=FileNotFoundError)


@pytest.mark.parametrize("name", ["gpt2", "llama_mha", "llama_sharded", "qwen3"])
def test_b54_a_missing_tensor_is_named(name, tmp_path):
    for path in copy_of(name, tmp_path).glob("*.safetensors"):
        whole = path.read_bytes()
        header, data = read_safetensors(path)
        for key in header.keys() - {"__metadata__"}:
            if key.endswith((".attn.bias", ".attn.masked_bias", "inv_freq")):
                continue  # nobody needs those
            renamed = {k if k != key else "unused": entry for k, entry in header.items()}
            write_safetensors(path, renamed, data)
            short = key.removeprefix("model.").removeprefix("transformer.")
            assert_refused(tmp_path, short, path.name)
            path.write_bytes(whole)


@pytest.mark.parametrize("name", ["gpt2", "llama_sharded", "qwen2"])
def test_b54_a_wrong_shape_is_told_with_the_right_one(name, tmp_path):
    for path in copy_of(name, tmp_path).glob("*.safetensors"):
        whole = path.read_bytes()
        for key, entry in read_safetensors(path)[0].items():
            if key == "__metadata__" or key.endswith((".attn.bias", ".attn.masked_bias")):
                continue
            header, data = read_safetensors(path)
            header[key]["shape"] = [1, *entry["shape"]]  # as many numbers as before
            write_safetensors(path, header, data)
            short = key.removeprefix("model.").removeprefix("transformer.")
            assert_refused(tmp_path, path, short, [1, *entry["shape"]], entry["shape"])
            path.write_bytes(whole)


# --- the index of a sharded checkpoint ------------------------------------------------------------


def set_index(folder, content):
    path = folder / "model.safetensors.index.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize("name", [
    "../model-00001-of-00003.safetensors", "sub/model.safetensors", "./x.safetensors",
    "..", ".", "",
])  # fmt: skip
def test_the_index_cannot_name_a_file_elsewhere(name, tmp_path):
    # Each of these files would even be there and be right.
    folder = copy_of("llama_sharded", tmp_path / "model")
    (folder / "sub").mkdir()
    shard = folder / "model-00001-of-00003.safetensors"
    for place in tmp_path / shard.name, folder / "sub/model.safetensors", folder / "x.safetensors":
        shutil.copy(shard, place)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    mapped = {k: name if v == shard.name else v for k, v in index["weight_map"].items()}
    set_index(folder, {"weight_map": mapped})
    assert_refused(folder, repr(name))


def test_the_index_cannot_name_an_absolute_path(tmp_path):
    folder = copy_of("llama_sharded", tmp_path)
    path = str(folder / "model-00001-of-00003.safetensors")
    set_index(folder, {"weight_map": {"model.norm.weight": path}})
    assert_refused(folder, repr(path))


@pytest.mark.parametrize("content", [
    "", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}',
    '{"weight_map": {"a": null}}', '{"weight_map": {}}', "[" * 100_000,
])  # fmt: skip
def test_a_damaged_index_is_an_error(content, tmp_path):
    set_index(copy_of("llama_sharded", tmp_path), content)
    assert_refused(tmp_path)


def test_only_files_that_the_index_names_are_opened(tmp_path, monkeypatch):
    folder = copy_of("llama_sharded", tmp_path)
    expected = logits_of(folder, [1, 2, 3])
    (folder / "consolidated.safetensors").write_bytes(b"not even a safetensors file")
    shutil.copy(FOLDER / "llama_tied" / "model.safetensors", folder / "other.safetensors")
    opened, really_open = set(), io.open

    def watched(file, *args, **kwargs):
        if not str(file).startswith("/proc/"):  # threadpoolctl looks for the BLAS there
            opened.add(Path(file).name)
        return really_open(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", watched)
    monkeypatch.setattr(builtins, "open", watched)
    logits = logits_of(folder, [1, 2, 3])
    shards = {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    assert opened == {"config.json", "model.safetensors.index.json", *shards}
    assert (logits == expected).all()


# --- damaged safetensors files --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_tied", "gpt2_n_inner_null", "llama_sharded"])
def test_a_truncated_file_is_an_error_at_every_length(name, tmp_path):
    path = max(copy_of(name, tmp_path).glob("*.safetensors"))
    whole = path.read_bytes()
    data = 8 + int.from_bytes(whole[:8], "little")
    edges = {0, 1, 7, 8, 9, data - 1, data, data + 1, len(whole) - 1, len(whole) - 2}
    for length in sorted(edges | set(range(0, len(whole), 331))):
        path.write_bytes(whole[:length])
        assert_refused(tmp_path, path)


def test_a_header_length_beyond_the_file_is_an_error(tmp_path):
    path = copy_of("llama_tied", tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for length in len(whole) - 7, len(whole), 2**31, 2**63, 2**64 - 1:
        path.write_bytes(length.to_bytes(8, "little") + whole[8:])
        assert_refused(tmp_path, path)


def entry(dtype="F32", shape=(2,), data_offsets=(0, 8)):
    return {"model.norm.weight": dict(dtype=dtype, shape=shape, data_offsets=data_offsets)}


@pytest.mark.parametrize("header", [
    b"", b"{", b"\xff\xfe", b"[]", b"3", b"null", b"[" * 100_000, b'{"a": ' * 100_000,
    b'{"a": ' + b"9" * 5000 + b"}", b'{"a": 3}', b'{"a": []}', b'{"a": {}}',
    entry(dtype=None), entry(dtype=[]), entry(dtype={}), entry(shape=3), entry(shape=None),
    entry(shape=[-2]), entry(shape=[-1, -2]), entry(shape=[2.0]), entry(shape=["2"]),
    entry(shape=[[2]]), entry(shape=[3]), entry(shape=[10**30]), entry(data_offsets=[0, 8, 8]),
    entry(data_offsets=[0]), entry(data_offsets=None), entry(data_offsets=["0", "8"]),
    entry(data_offsets=[-8, 0]), entry(data_offsets=[8, 0]), entry(data_offsets=[0.0, 8.0]),
    entry(data_offsets=[0, 10**30]), entry(data_offsets=[10**30, 10**30 + 8]),
], ids=lambda header: str(header)[:60])  # fmt: skip
def test_a_damaged_header_is_an_error_that_names_the_file(header, tmp_path):
    path = copy_of("llama_tied", tmp_path) / "model.safetensors"
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    assert_refused(tmp_path, path)


def lengthen(header, data):  # a hole at the end: bytes that no tensor claims
    return header, data + bytes(4)


def overlap(header, data):  # two norms of one layer share their bytes, the other's are not read
    layer = "model.layers.0."
    there = header[layer + "input_layernorm.weight"]["data_offsets"]
    header[layer + "post_attention_layernorm.weight"]["data_offsets"] = there
    return header, data


@pytest.mark.parametrize("damage", [lengthen, overlap])
def test_tensors_must_fill_the_file_without_holes_or_overlaps(damage, tmp_path):
    # As the format demands. It is what tells shifted data from the right ones.
    path = copy_of("llama_tied", tmp_path) / "model.safetensors"
    write_safetensors(path, *damage(*read_safetensors(path)))
    assert_refused(tmp_path, path)


def test_a_header_length_that_is_wrong_within_the_padding_does_not_shift_the_numbers(tmp_path):
    # Headers are padded with spaces: a length that is too small by less still leaves valid JSON.
    path = copy_of("llama_tied", tmp_path) / "model.safetensors"
    header, data = read_safetensors(path)
    head = json.dumps(header).encode() + b"    "
    path.write_bytes((len(head) - 2).to_bytes(8, "little") + head + data)
    assert_refused(tmp_path, path)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder whose model.safetensors may be overwritten, that file's bytes, and its weights."""
    folder = copy_of("llama_tied", tmp_path_factory.mktemp("small"))
    whole = (folder / "model.safetensors").read_bytes()
    return folder, whole, model.load(folder).weights


def same_weights(a, b):
    if isinstance(a, np.ndarray):
        return a.tobytes() == b.tobytes()
    keys = range(len(a)) if isinstance(a, list) else a
    return len(a) == len(b) and all(same_weights(a[k], b[k]) for k in keys)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3))
@example([(0, 0), (1, 0)])
@example([(7, 255)])
@example([(8, ord("["))])
def test_random_damage_to_a_header_is_an_error_or_harmless(small, changes):
    folder, whole, weights = small
    damaged, end = bytearray(whole), 8 + int.from_bytes(whole[:8], "little")
    for position, byte in changes:
        damaged[position % end] = byte
    (folder / "model.safetensors").write_bytes(damaged)
    try:
        loaded = model.load(folder).weights
    except (ValueError, FileNotFoundError, MemoryError):
        return
    assert same_weights(loaded, weights)


# --- config.json: not implemented is refused by name ----------------------------------------------


@pytest.mark.parametrize("model_type", ["bloom", "gpt_neox", "", "LLAMA", None, 3, ["llama"], {}])
def test_an_unknown_family_is_refused_with_the_known_ones(model_type, tmp_path):
    folder = edit(copy_of("llama_mha", tmp_path), model_type=model_type)
    assert_refused(folder, folder, repr(model_type), *model.FAMILIES)


@pytest.mark.parametrize("rope_type", ["yarn", "dynamic", "longrope", "su", "mrope"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_another_rope_type_is_refused_by_name(rope_type, place, spelling, tmp_path):
    rope = {spelling: rope_type, "factor": 4.0, "original_max_position_embeddings": 32}
    assert_refused(edit(copy_of("llama_mha", tmp_path), **{place: rope}), "config.json", rope_type)


@pytest.mark.parametrize("change", [
    {"rope_scaling": {"rope_type": "linear", "factor": value}}
    for value in (None, 0, -2.0, "2", True, [2], float("nan"), float("inf"))
] + [
    {"rope_scaling": llama3(8.0) | {key: value}}
    for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    for value in (None, 0, "8")
] + [
    {"rope_scaling": llama3(8.0) | {"low_freq_factor": 4.0}},  # nothing between low and high
    {"rope_scaling": "linear"}, {"rope_scaling": [1]}, {"rope_parameters": 2.0},
    {"partial_rotary_factor": 0.5},
], ids=str)  # fmt: skip
def test_impossible_rope_parameters_are_refused(change, tmp_path):
    assert_refused(edit(copy_of("llama_mha", tmp_path), **change), "config.json")


def context(folder, tokens, **changes):
    return edit(folder, max_position_embeddings=tokens, **changes)


def test_mistral_is_refused_where_its_sliding_window_would_matter(tmp_path):
    # A file that is silent about it means 4096 (Mistral 7B v0.1); null means none (v0.2, v0.3).
    folder = copy_of("mistral", tmp_path)
    assert_refused(edit(context(folder, 4097), "sliding_window"), "config.json", "window", 4096)
    assert_refused(context(folder, 32768, sliding_window=4096), "config.json", "window", 4096)
    assert model.load(context(folder, 32768, sliding_window=None)).context == 32768
    assert model.load(context(folder, 4096, sliding_window=4096)).context == 4096
    assert model.load(edit(context(folder, 4096), "sliding_window")).context == 4096


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_qwen_is_refused_where_its_sliding_window_is_switched_on(name, tmp_path):
    # Off is the default, and then the size that is always there does not matter.
    folder = copy_of(name, tmp_path)
    assert_refused(edit(folder, use_sliding_window=True, sliding_window=7), "config.json", "window")
    model.load(edit(folder, use_sliding_window=False))
    model.load(edit(folder, "use_sliding_window"))
    model.load(edit(folder, use_sliding_window=True, sliding_window=BILLION))
    # On and of unknown size: Hugging Face takes 4096 then.
    assert_refused(edit(context(folder, 4097), "sliding_window"), "config.json", "window")


@pytest.mark.parametrize("name, key, value, word", [
    ("llama_mha", "quantization_config", {"quant_method": "gptq"}, "quantized"),
    ("llama_mha", "hidden_act", "gelu", "gelu"),
    ("qwen2", "hidden_act", "gelu_new", "gelu_new"),
    ("gpt2", "activation_function", "relu", "relu"),
    ("gpt2", "activation_function", "gelu", "got 'gelu'"),  # the exact one; GPT-2's is approximate
    ("gpt2", "scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", "scale_attn_weights", False, "scale_attn_weights"),
    ("gpt2", "add_cross_attention", True, "add_cross_attention"),
])  # fmt: skip
def test_what_is_not_implemented_is_refused(name, key, value, word, tmp_path):
    assert_refused(edit(copy_of(name, tmp_path), **{key: value}), word)


# --- config.json: values that cannot be -----------------------------------------------------------

COUNTS = [("llama_mha", key) for key in (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "num_hidden_layers", "vocab_size", "max_position_embeddings", "head_dim",
)] + [("gpt2_n_inner_null", key) for key in (
    "n_embd", "n_head", "n_layer", "n_positions", "n_inner", "vocab_size",
)]  # fmt: skip
NUMBERS = [
    ("llama_mha", "rms_norm_eps"),
    ("gpt2", "layer_norm_epsilon"),
    ("llama_mha", "rope_theta"),
]
FLAGS = [("llama_mha", key) for key in ("tie_word_embeddings", "attention_bias", "mlp_bias")]


@pytest.mark.parametrize("value", ["8", -1, 0, True, 2.5, [4], {}, 10**12, 10**30], ids=repr)
@pytest.mark.parametrize("name, key", COUNTS)
def test_a_count_must_be_a_positive_integer_that_the_files_agree_with(name, key, value, tmp_path):
    folder = edit(copy_of(name, tmp_path), **{key: value})
    huge = isinstance(value, int) and value > 1
    if huge and key == "max_position_embeddings":  # nothing in the files contradicts it
        assert model.load(folder).context == value
    elif huge and "layer" in key:  # the first layer that is not there is named instead
        assert_refused(folder, "no tensor", ".3." if name == "gpt2_n_inner_null" else ".2.")
    else:
        assert_refused(folder, "config.json")


@pytest.mark.parametrize(
    "value", ["1e-5", "abc", -1.0, True, [1.0], {}, float("nan"), float("inf")], ids=repr
)
@pytest.mark.parametrize("name, key", NUMBERS)
def test_a_number_must_be_a_finite_one_and_not_negative(name, key, value, tmp_path):
    assert_refused(edit(copy_of(name, tmp_path), **{key: value}), "config.json")


def test_theta_must_not_be_zero(tmp_path):
    assert_refused(edit(copy_of("llama_mha", tmp_path), rope_theta=0), "config.json")


@pytest.mark.parametrize("value", ["false", "true", 2.5, [True]], ids=repr)
@pytest.mark.parametrize("name, key", FLAGS)
def test_a_flag_must_be_true_or_false(name, key, value, tmp_path):
    # "false" is true in Python: the head would silently be the embedding.
    assert_refused(edit(copy_of(name, tmp_path), **{key: value}), "config.json")


@pytest.mark.parametrize("heads", [4, 7])
def test_gpt2_heads_must_divide_the_width(heads, tmp_path):
    assert_refused(edit(copy_of("gpt2_n_inner_null", tmp_path), n_head=heads), "config.json")


def test_llama_heads_must_be_a_multiple_of_the_key_heads(tmp_path):
    folder = edit(copy_of("llama_gqa", tmp_path), num_key_value_heads=4)
    assert_refused(folder, "config.json", 6, 4)


@pytest.mark.parametrize("name, key", [
    ("llama_gqa", key) for key in (
        "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size",
        "vocab_size", "max_position_embeddings",
    )
] + [("gpt2_prefix", key) for key in ("n_embd", "n_head", "n_layer", "vocab_size")])  # fmt: skip
def test_an_absent_key_that_is_needed_is_named(name, key, tmp_path):
    folder = copy_of(name, tmp_path)
    assert_refused(edit(folder, key), "config.json", key)
    assert_refused(edit(folder, **{key: None}), "config.json", key)


def test_a_refusal_gives_the_value_and_not_the_whole_config():
    with pytest.raises(ValueError, match="-3") as caught:
        model.llama_config(CONFIG | {"num_hidden_layers": -3, "head_dim": 128})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", [
    "", "{", "[]", "3", "null", '"llama"', '{"vocab_size": ' + "9" * 5000 + "}", "[" * 100_000,
    b"\xff\xfe{}", b"\xef\xbb\xbf{}",
], ids=lambda text: repr(text)[:30])  # fmt: skip
def test_a_damaged_config_is_an_error_that_names_the_file(text, tmp_path):
    path = copy_of("llama_mha", tmp_path) / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_refused(tmp_path, path)


# --- memory ---------------------------------------------------------------------------------------


def test_a_model_larger_than_the_machine_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    path = copy_of("llama_float16", tmp_path) / "model.safetensors"
    header, _ = read_safetensors(path)
    entries = [e for key, e in header.items() if key != "__metadata__"]
    needed = 4 * sum(int(np.prod(e["shape"])) for e in entries)  # bytes as float32
    machine = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": needed}
    monkeypatch.setattr(model.os, "sysconf", machine.get)
    model.load(tmp_path)

    machine["SC_PHYS_PAGES"] = needed - 1
    monkeypatch.setattr(model, "read_into", lambda *_: pytest.fail("a weight was read"))
    assert_refused(tmp_path, tmp_path, "GB", error=MemoryError)


# Prints the bytes by which the peak grew. Not getrusage: its peak starts with that of the process
# that started this one, and pytest's may already be higher than ours will ever be.
PEAK = """
import sys, model
def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith(name + ":")) * 1024
before = status("VmRSS")
weights = model.load(sys.argv[1]).weights
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measured through /proc")
def test_loading_peaks_little_above_the_weights(tmp_path):
    # 25 million float16 numbers: 50 MB of file, 100 MB in memory. Reading the whole file at once,
    # or joining two matrices by a copy of both, needs half as much again or more.
    config = CONFIG | dict(
        vocab_size=24_000, hidden_size=512, head_dim=128, num_key_value_heads=4,
        intermediate_size=7500,
    )  # fmt: skip
    layer = "model.layers.0."
    header, end = {}, 0
    for key, shape in {
        "model.embed_tokens.weight": [24_000, 512], "model.norm.weight": [512],
        layer + "input_layernorm.weight": [512], layer + "post_attention_layernorm.weight": [512],
        **{f"{layer}self_attn.{x}_proj.weight": [512, 512] for x in "qkvo"},
        layer + "mlp.gate_proj.weight": [7500, 512], layer + "mlp.up_proj.weight": [7500, 512],
        layer + "mlp.down_proj.weight": [512, 7500],
    }.items():  # fmt: skip
        start, end = end, end + 2 * int(np.prod(shape))
        header[key] = dict(dtype="F16", shape=shape, data_offsets=[start, end])
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", header, b"")
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) + end)  # zeros that take no disk
    assert end > 49e6

    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    root = Path(model.__file__).parent
    got = int(subprocess.run(command, cwd=root, capture_output=True, check=True).stdout)
    float32 = 2 * end
    assert float32 < got < 1.25 * float32 + 8e6, f"{got / float32:.2f} times the weights"


# --- backends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "complex64", "", None])
def test_the_numpy_backend_refuses_other_types(dtype):
    with pytest.raises(ValueError, match="float32 or float64"):
        model.numpy_backend(dtype)
