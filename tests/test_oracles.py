"""Contract: model.py computes what Hugging Face computes, and every tensor of a file counts.

For each folder f of tests/data/oracles, with the tokens t stored there, and every kept row r,

    load(f)(t)[r] = the logits of transformers' model for f, in float64          (to 1e-9)

however t is fed: in one pass, token by token, in pieces, or again after a rollback. The folders
cover the families, their config spellings and file layouts; make_fixtures.py lists and makes them.

An equality alone can hold by luck (a bias of zero, a norm of one, a window that is never reached).
So each tensor of each file is negated once, and the logits must move; those a reader has to skip
(stored masks, stored rotary frequencies, the second copy of a tied head) must not move them.
"""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import model

FOLDER = Path(__file__).parent / "data" / "oracles"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/oracle.npz"))
every_fixture = pytest.mark.parametrize("name", NAMES)

BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}
SKIPPED = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")


def read_oracle(name):
    """-> tokens (a list of T ids), rows [R], logits [R, V]."""
    with np.load(FOLDER / name / "oracle.npz") as file:
        return file["tokens"].tolist(), file["rows"], file["logits"]


def logits_of(folder, tokens, dtype="float64"):  # -> [T, V]
    m = model.load(folder, model.numpy_backend(dtype))
    return m(tokens, m.new_cache(len(tokens)), rows=len(tokens))


def distance(a, b):  # [R, V], [R, V] -> largest difference, in units of the largest logit
    assert a.shape == b.shape
    return np.abs(a - b).max() / np.abs(b).max()


def read_safetensors(path):
    """-> the header (a dict) and the data (bytes) of one file, by the format's definition."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:start]), bytearray(raw[start:])


def write_safetensors(path, header, data):
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


def negate(path, key):
    """Flip the sign bit of every number of one tensor: the last byte of each, in any type."""
    header, data = read_safetensors(path)
    start, end = header[key]["data_offsets"]
    size = BYTES[header[key]["dtype"]]
    assert end - start == size * math.prod(header[key]["shape"]) > 0
    data[start + size - 1 : end : size] = bytes(
        b ^ 0x80 for b in data[start + size - 1 : end : size]
    )
    write_safetensors(path, header, data)


# --- the same numbers as Hugging Face -----------------------------------------------------------


def test_every_family_has_an_oracle():
    kinds = {json.loads((FOLDER / n / "config.json").read_text())["model_type"] for n in NAMES}
    assert kinds >= set(model.FAMILIES)


@every_fixture
def test_one_pass_gives_the_logits_of_hugging_face(name):
    tokens, rows, expected = read_oracle(name)
    logits = logits_of(FOLDER / name, tokens)
    assert logits.dtype == np.float64
    assert distance(logits[rows], expected) < 1e-9


@every_fixture
def test_float32_gives_them_to_rounding(name):
    tokens, rows, expected = read_oracle(name)
    logits = logits_of(FOLDER / name, tokens, "float32")
    assert logits.dtype == np.float32
    assert distance(logits[rows], expected) < 1e-4


# --- however the tokens are fed -----------------------------------------------------------------


@every_fixture
def test_token_by_token_equals_one_pass(name):
    tokens, _, _ = read_oracle(name)
    m = model.load(FOLDER / name, model.numpy_backend("float64"))
    cache = m.new_cache(len(tokens))
    steps = [m(tokens[: i + 1], cache, rows=1) for i in range(len(tokens))]
    assert cache.length == len(tokens)
    assert distance(np.concatenate(steps), logits_of(FOLDER / name, tokens)) < 1e-10


@every_fixture
def test_pieces_and_fewer_rows_equal_one_pass(name):
    tokens, _, _ = read_oracle(name)
    expected = logits_of(FOLDER / name, tokens)
    m = model.load(FOLDER / name, model.numpy_backend("float64"))
    cache = m.new_cache(len(tokens) + 3)
    assert distance(m(tokens[:2], cache, rows=2), expected[:2]) < 1e-10
    assert distance(m(tokens[:9], cache, rows=4), expected[5:9]) < 1e-10
    assert distance(m(tokens, cache, rows=len(tokens) - 9), expected[9:]) < 1e-10


@every_fixture
def test_feeding_again_after_a_rollback_equals_one_pass(name):
    tokens, _, _ = read_oracle(name)
    expected = logits_of(FOLDER / name, tokens)
    m = model.load(FOLDER / name, model.numpy_backend("float64"))
    cache = m.new_cache(len(tokens))

    # Another continuation first: its keys and values must be gone after the rollback.
    n = len(tokens) // 2
    m(tokens[:n] + tokens[:n], cache, rows=1)
    cache.truncate(n)
    assert cache.length == n
    assert distance(m(tokens, cache, rows=len(tokens) - n), expected[n:]) < 1e-10


# --- every tensor of the file counts ------------------------------------------------------------


@every_fixture
def test_negating_a_tensor_moves_the_logits_unless_it_is_to_be_skipped(name, tmp_path):
    tokens = read_oracle(name)[0][:17]
    config = json.loads((FOLDER / name / "config.json").read_text())
    tied = config.get("tie_word_embeddings", config["model_type"] == "gpt2")
    shutil.copytree(FOLDER / name, tmp_path, dirs_exist_ok=True)
    before = logits_of(tmp_path, tokens)

    for path in sorted(tmp_path.glob("*.safetensors")):
        original = path.read_bytes()
        for key in read_safetensors(path)[0].keys() - {"__metadata__"}:
            negate(path, key)
            moved = distance(logits_of(tmp_path, tokens), before)
            path.write_bytes(original)
            if SKIPPED.search(key) or (tied and key == "lm_head.weight") or "consol" in path.name:
                assert moved < 1e-12, f"{key} is read, it moved the logits by {moved}"
            else:
                assert moved > 1e-3, f"{key} is not used, it moved the logits by {moved}"


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("gpt2")])
def test_gpt2_files_load_with_and_without_their_prefix(name, tmp_path):
    shutil.copytree(FOLDER / name, tmp_path, dirs_exist_ok=True)
    tokens, _, _ = read_oracle(name)
    expected = logits_of(FOLDER / name, tokens)
    header, data = read_safetensors(FOLDER / name / "model.safetensors")
    bare = {key.removeprefix("transformer."): entry for key, entry in header.items()}
    unnamed = {"__metadata__", "lm_head.weight"}
    prefixed = {k if k in unnamed else f"transformer.{k}": entry for k, entry in bare.items()}

    assert header in (bare, prefixed)
    for other in bare, prefixed:
        write_safetensors(tmp_path / "model.safetensors", other, data)
        assert distance(logits_of(tmp_path, tokens), expected) < 1e-12
