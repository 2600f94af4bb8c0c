"""Contract: every way to multiply gives x @ W.T, for any number of rows and any shape.

The ways differ only in the order in which W is read, so in float64 they agree to rounding. Shapes
here have remainders for every tile height, and rows come strided, as a slice of a wider array does.
"""

import numpy as np
import pytest
import threadpoolctl

import model


@pytest.mark.parametrize("way", model.WAYS)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("out, width", [(7, 5), (64, 3), (131, 37), (300, 29), (70, 20_011)])
def test_every_way_is_the_product(way, rows, out, width):
    rng = np.random.default_rng([rows, out, width])
    W, wide = rng.standard_normal((out, width)), rng.standard_normal((rows, 2 * width))
    x = wide[:, ::2]
    y = model.WAYS[way](x, W)
    assert y.shape == (rows, out) and y.flags.c_contiguous
    np.testing.assert_allclose(y, (x[:, None, :] * W).sum(-1), rtol=1e-9, atol=1e-9)


def test_the_fastest_measured_way_is_taken(monkeypatch):
    """The clock is replaced: which way is quickest depends on the rows and on the shape."""
    quickest = {(6, 1): "dots", (6, 2): "tiles", (9, 1): "dots, 2 threads", (9, 2): "tiles"}
    quickest |= {(20, 1): "dots, 2 threads", (20, 2): "tiles"}  # the head

    def seconds(way, x, W):
        return float(way is not model.WAYS[quickest[len(W), min(len(x), 2)]])

    monkeypatch.setattr(model, "_seconds", seconds)
    fastest, layer = (
        model.FastestWay(),
        {"a": np.ones((6, 4)), "b": np.ones((9, 4)), "c": np.ones(4)},
    )
    fastest.measure({"layers": [layer, layer], "embed": np.ones((20, 4))})
    for (out, T), name in quickest.items():
        assert fastest.way[T, (out, 4)] is model.WAYS[name], (out, T)
    assert fastest.way[7, (6, 4)] is fastest.way[64, (6, 4)] is model.by_tiles
    assert set(fastest.milliseconds) == set(fastest.ROWS)


@pytest.mark.parametrize("rows", [1, 5, 64, 70])
@pytest.mark.parametrize("out", [6, 13, 200])
def test_measured_or_not_every_shape_is_multiplied(rows, out):
    fastest, x = model.FastestWay(), np.random.default_rng(0).standard_normal((rows, 4))
    W = np.random.default_rng(1).standard_normal((out, 4))
    np.testing.assert_allclose(fastest(x, W), x @ W.T, rtol=1e-12, atol=1e-12)
    fastest.measure({"layers": [{"a": np.ones((6, 4))}], "embed": np.ones((200, 4))})
    np.testing.assert_allclose(fastest(x, W), x @ W.T, rtol=1e-12, atol=1e-12)


def test_blas_gets_its_threads_back_after_a_pass():
    def threads():
        return [
            b["num_threads"] for b in threadpoolctl.threadpool_info() if b["user_api"] == "blas"
        ]

    before = threads()
    with model.one_blas_thread()():
        assert set(threads()) <= {1}
    assert threads() == before


def test_a_way_can_be_forced_and_must_exist():
    assert model.numpy_backend("float32", "tiles").linear is model.by_tiles
    assert model.numpy_backend("float64").linear is model.by_matmul
    with pytest.raises(ValueError, match="the ways to multiply"):
        model.numpy_backend("float32", "magic")
