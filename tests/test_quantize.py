"""Contract: a packed matrix is scale * code + minimum, however it is multiplied, and close to W.

One rounding step is half a scale, beside what float16 does to scale and minimum. Serial and batched
verification multiply with the same numbers. Shapes here leave the last group and block half full.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import minispec
import model
from weights.fetch import resolve

FOLDER = Path(__file__).parent / "data" / "oracles" / "llama_tied"
SHAPES = [(7, 5), (64, 32), (131, 100), (300, 65)]


def random_matrix(out, width):
    return np.random.default_rng([out, width]).standard_normal((out, width)).astype(np.float32)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(model, "BLOCK", 32 * 65)  # so that every shape but the first has several


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("out, width", SHAPES)
def test_every_weight_is_within_half_a_step(small_blocks, bits, out, width):
    W = random_matrix(out, width)
    rows = model.Packed(W, bits).rows(range(out))
    for a in range(0, width, model.GROUP):
        group, got = W[:, a : a + model.GROUP], rows[:, a : a + model.GROUP]
        span = np.ptp(group, axis=1, keepdims=True)
        # float16 rounds scale and minimum by up to 2^-11 of themselves.
        slack = 2**-11 * (span + np.abs(group).max(axis=1, keepdims=True))
        assert (np.abs(got - group) <= span / (2**bits - 1) / 2 + slack + 1e-6).all()
        assert len(np.unique(got[0])) <= 2**bits


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 5, 70])
@pytest.mark.parametrize("out, width", SHAPES)
def test_a_packed_product_is_the_product_with_what_was_packed(small_blocks, bits, rows, out, width):
    packed = model.Packed(random_matrix(out, width), bits)
    wide = random_matrix(rows, 2 * width)
    y = packed.product(wide[:, ::2])
    assert y.shape == (rows, out) and y.dtype == np.float32
    np.testing.assert_allclose(y, wide[:, ::2] @ packed.rows(range(out)).T, rtol=1e-4, atol=1e-4)


def check_groups_and_halves():
    """What is exact in 4 bits comes back exactly: two groups of different scale, codes 0 to 15."""
    codes = np.arange(64).reshape(2, 32) // 2 % 16
    W = np.concatenate([codes * 0.5 - 1, codes[:, ::-1] * 2.0], axis=1).astype(np.float32)
    packed = model.Packed(W, 4)
    assert np.array_equal(packed.rows([0, 1]), W)
    assert np.array_equal(packed.product(np.eye(64, dtype=np.float32)), W.T)


def check_nearest_codes():
    """With scale 1 and minimum 0, codes are the nearest integers."""
    W = np.array([[0.0, 15.0, 3.4, 3.6, 14.9, 0.4]], np.float32)
    assert model.Packed(W, 4).rows([0]).tolist() == [[0, 15, 3, 4, 15, 0]]


def test_what_four_bits_can_hold_comes_back():
    check_groups_and_halves()
    check_nearest_codes()


def test_tiles_are_packed_like_the_matrix_they_hold():
    W = random_matrix(131, 37)
    (tiles,) = model.empty_tiles([W.shape], W.dtype)
    tiles[0 : len(W)] = W
    plain, tiled = model.Packed(W, 4), model.Packed(tiles, 4)
    assert np.array_equal(plain.rows(range(131)), tiled.rows(range(131)))


@pytest.mark.parametrize("damage", [np.nan, 1e6])
def test_what_float16_cannot_hold_is_refused(damage):
    W = random_matrix(40, 40)
    W[3, 4] = damage
    with pytest.raises(ValueError, match="packed"):
        model.Packed(W, 4)


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "gpt2"])
def test_a_quantized_model_is_the_model_of_its_unpacked_weights(name):
    loaded = model.load(FOLDER.with_name(name), model.numpy_backend("float64"))
    packed = model.quantize(loaded)

    def unpacked(w):
        return {
            k: W.rows(range(W.shape[0])).astype(float) if isinstance(W, model.Packed) else W
            for k, W in w.items()
        }

    weights = unpacked(packed.weights)
    weights["layers"] = [unpacked(layer) for layer in packed.weights["layers"]]
    same = model.Model(loaded.config, weights, loaded.backend, loaded.block)
    tokens = [1, 5, 2, 7, 3]
    logits = [m(tokens, m.new_cache(5), rows=5) for m in (packed, same)]
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-4)
    kinds = {k: W for layer in packed.weights["layers"] for k, W in layer.items()}
    assert all(isinstance(W, model.Packed) == (W.ndim == 2) for W in kinds.values())
    assert packed.weights["embed"].bits == 8


def check_serial_is_one_row_at_a_time():
    """Up to FEW rows go through one by one, more than that at once; the numbers are the same."""
    loaded = model.quantize(model.load(FOLDER, model.numpy_backend()))
    seen = []

    def counted(x, W):
        seen.append(x.shape[0])
        return loaded.backend.linear(x, W)

    backend = dataclasses.replace(loaded.backend, linear=counted)
    watched = model.Model(loaded.config, loaded.weights, backend, loaded.block)
    serial, tokens = model.verify_serially(watched), [1, 2, 3, 4]
    cache = serial.new_cache(4)
    logits = serial(tokens, cache, rows=4)
    assert set(seen) == {1}
    batched = loaded(tokens, loaded.new_cache(4), rows=4)
    np.testing.assert_allclose(logits, batched, rtol=1e-4, atol=1e-4)
    seen.clear()
    long = [1] * (model.FEW + 1)
    serial(long, serial.new_cache(len(long)), rows=1)
    assert model.FEW + 1 in seen


def test_serial_verification_multiplies_one_row_at_a_time():
    check_serial_is_one_row_at_a_time()


def test_quantizing_twice_or_elsewhere_is_refused():
    loaded = model.load(FOLDER, model.numpy_backend())
    packed = model.quantize(loaded)
    with pytest.raises(ValueError, match="int4"):
        model.quantize(packed)
    loaded.backend = dataclasses.replace(loaded.backend, xp=object(), name="another")
    with pytest.raises(ValueError, match="another"):
        model.quantize(loaded)


def test_the_quantized_copy_drafts():
    target = model.load(FOLDER, model.numpy_backend())
    draft = minispec.load_drafter("int4", target, None)
    assert (draft.name, draft.model.vocab) == ("int4", target.vocab)
    plain = list(minispec.autoregressive(target, [1, 2, 3], max_new_tokens=12))
    rounds = list(minispec.generate(target, [1, 2, 3], draft, 3, max_new_tokens=12))
    assert [x for r in rounds for x in r.tokens] == plain
    assert sum(r.accepted for r in rounds) > 0


def test_the_default_target_in_four_bits():
    """Weights at most a quarter; on its own text the distribution hardly moves."""
    folder = resolve()
    target = model.load(folder)
    packed, tokenizer = model.quantize(target), model.Tokenizer(folder)
    size = {m: sum(W.nbytes for W in matrices(m)) for m in (target, packed)}
    assert size[packed] <= 0.25 * size[target]
    prompt = tokenizer.chat("Explain in two sentences why the sky is blue.")
    text = [*prompt, *minispec.autoregressive(target, prompt, max_new_tokens=60)]
    p, q = (
        minispec.probabilities(m(text, m.new_cache(len(text)), rows=60)) for m in (target, packed)
    )
    divergence = (p * np.log(p / np.maximum(q, 1e-30), where=p > 0, out=np.zeros_like(p))).sum(-1)
    assert 0 <= divergence.mean() < 0.02


def matrices(m):
    layers = [W for layer in m.weights["layers"] for W in layer.values() if W.ndim == 2]
    return [*layers, m.weights["embed"]]
