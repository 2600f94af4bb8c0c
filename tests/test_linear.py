"""Contract: every way to multiply gives x @ W.T, for any number of rows and any shape.

The ways differ only in the order in which W is read, so in float64 they agree to rounding. Shapes
here have remainders for every tile height, and rows come strided, as a slice of a wider array does.
"""

import numpy as np
import pytest

import model


@pytest.mark.parametrize("way", model.WAYS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 16, 17])
@pytest.mark.parametrize("out, width", [(7, 5), (64, 3), (131, 37), (200, 20_011)])
def test_every_way_is_the_product(way, rows, out, width):
    rng = np.random.default_rng([rows, out, width])
    W, wide = rng.standard_normal((out, width)), rng.standard_normal((rows, 2 * width))
    x = wide[:, ::2]
    y = model.WAYS[way](x, W)
    assert y.shape == (rows, out) and y.flags.c_contiguous
    np.testing.assert_allclose(y, (x[:, None, :] * W).sum(-1), rtol=1e-9, atol=1e-9)


def test_the_fastest_measured_way_is_taken(monkeypatch):
    """The clock is replaced: one way is told to be the quickest for one row, another for more."""
    quickest = {1: "dots", 2: "tiles", 3: "matmul"}
    monkeypatch.setattr(
        model, "_seconds", lambda way, x, W: float(way is not model.WAYS[quickest[min(len(x), 3)]])
    )
    fastest = model.FastestWay()
    fastest.measure({"layers": [{"a": np.ones((6, 4)), "b": np.ones(4)} for _ in range(2)]})
    chosen = [fastest.way[T].__name__ for T in (1, 2, 3, 7, 16)]
    assert chosen == ["by_dots", "by_tiles", "by_matmul", "by_matmul", "by_matmul"]
    assert set(fastest.milliseconds) == set(fastest.ROWS)


def test_a_way_can_be_forced_and_must_exist():
    assert model.numpy_backend("float32", "tiles").linear is model.by_tiles
    assert model.numpy_backend("float64").linear is model.by_matmul
    with pytest.raises(ValueError, match="the ways to multiply"):
        model.numpy_backend("float32", "magic")
