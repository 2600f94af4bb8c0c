"""Contract: plain or in tiles, on one thread or two, a product is x @ W.T, whatever the shapes.

The ways differ only in the order in which W is read, so in float64 they agree to rounding. Shapes
here leave a last tile half full, and rows come strided, as a slice of a wider array does.
"""

import itertools
import os
import signal
import threading

import numpy as np
import pytest
import threadpoolctl

import model

SHAPES = [(7, 5), (64, 3), (131, 37), (300, 29), (70, 20_011)]


def tiles_of(W):
    (tiles,) = model.empty_tiles([W.shape], W.dtype)
    tiles[0 : len(W)] = W
    return tiles


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 70])
@pytest.mark.parametrize("out, width", SHAPES)
def test_a_tiled_product_is_the_product(threads, rows, out, width):
    rng = np.random.default_rng([rows, out, width])
    W, wide = rng.standard_normal((out, width)), rng.standard_normal((rows, 2 * width))
    x, product = wide[:, ::2], model.TiledProduct()
    # Of every number of rows, compute one more than asked for, and on this many threads.
    product.best = {(rows, W.shape): (rows + 1, threads)}
    y = product(x, tiles_of(W))
    assert y.shape == (rows, out)
    np.testing.assert_allclose(y, (x[:, None, :] * W).sum(-1), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(model.plain_product(x, W), y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("out, width", SHAPES)
def test_tiles_hold_what_was_put_into_them(out, width):
    W = np.random.default_rng(0).standard_normal((out, width))
    tiles, middle = tiles_of(np.full_like(W, np.nan)), out // 2
    tiles[0:middle] = W[:middle]
    tiles[middle:out, 0:2] = W[middle:, :2]
    tiles[middle:out, 2:width] = W[middle:, 2:]
    ids = [0, out - 1, middle, 0]
    assert np.array_equal(tiles.rows(ids), W[ids]) and tiles.shape == W.shape
    full = np.moveaxis(tiles.stack, 1, 2).reshape(-1, width)
    assert np.array_equal(full[:out], W) and not full[out:].any()


def test_the_cheapest_measured_way_is_taken(monkeypatch):
    """The clock is replaced. Six rows cost less than three to five; for ten rows, and
    for the larger matrix, the second thread pays, though it costs three rows' time to wake it."""

    def seconds(product, x, stack, threads):
        rows = {3: 6.5, 4: 6.5, 5: 6.5}.get(len(x), len(x))
        return rows * stack.size / threads + (threads - 1) * 6_000.0

    monkeypatch.setattr(model, "_seconds", seconds)
    monkeypatch.setattr(model.os, "cpu_count", lambda: 2)
    product, small, large = model.TiledProduct(), np.ones((60, 32)), np.ones((600, 32))
    layer = {"a": tiles_of(small), "b": tiles_of(large), "c": np.ones(4)}
    product.measure({"layers": [layer, layer], "embed": tiles_of(large)})
    few = {T: product.best[T, small.shape] for T in range(1, model.FEW + 1)}
    assert few[1] == (1, 1) and few[2] == (2, 1) and few[9] == (10, 2)
    assert few[3] == few[4] == few[5] == few[6] == (6, 1)
    assert product.best[2, large.shape] == (2, 2) and product.best[3, large.shape] == (6, 2)
    assert set(product.milliseconds) == set(product.ROWS)
    expected = sum(seconds(None, range(8), tiles_of(W).stack, 1) for W in (small, large))
    assert product.milliseconds[8][1] == pytest.approx(1e3 * expected)


def test_one_core_gets_one_thread(monkeypatch):
    monkeypatch.setattr(model.os, "cpu_count", lambda: 1)
    product, layer = model.TiledProduct(), {"a": tiles_of(np.ones((60, 32)))}
    product.measure({"layers": [layer], "embed": tiles_of(np.ones((60, 32)))})
    assert {threads for _, threads in product.best.values()} == {1}


def test_a_large_matrix_is_measured_in_parts(monkeypatch):
    starts = []
    monkeypatch.setattr(model.TiledProduct, "SAMPLE", 3 * 32 * 16)
    monkeypatch.setattr(model, "_seconds", lambda f, x, stack, n: starts.append(stack.ctypes.data))
    W, product = tiles_of(np.ones((320, 16))), model.TiledProduct()
    with pytest.raises(TypeError):  # None seconds
        product._try(W, 1, 1, 0)
    for attempt in (1, 2, 3):
        with pytest.raises(TypeError):
            product._try(W, 1, 1, attempt)
    tile = W.stack[0].nbytes
    assert [(s - W.stack.ctypes.data) // tile for s in starts] == [0, 3, 6, 0]


def test_two_callers_can_share_the_second_thread():
    W, x = np.random.default_rng(1).standard_normal((300, 40)), np.eye(5, 40)
    product, wrong = model.TiledProduct(), []
    product.best, tiles = {(5, W.shape): (6, 2)}, tiles_of(W)

    def work(scale):
        for _ in range(50):
            if not np.allclose(product(scale * x, tiles), scale * x @ W.T):
                wrong.append(scale)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (1.0, 2.0)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_a_second_thread_of_its_own():
    W, product = tiles_of(np.ones((300, 40))), model.TiledProduct()
    product.best = {(5, W.shape): (6, 2)}
    product(np.eye(5, 40), W)  # starts the thread of this process
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends the child if it waits
        os._exit(0 if (product(np.eye(5, 40), W) == 1).all() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_blas_gets_its_threads_back_after_a_pass():
    def threads():
        return [
            b["num_threads"] for b in threadpoolctl.threadpool_info() if b["user_api"] == "blas"
        ]

    before = threads()
    with model.one_blas_thread():
        assert set(threads()) <= {1}
    assert threads() == before


def test_a_way_can_be_forced_and_must_exist(monkeypatch):
    assert model.numpy_backend("float32", "tiles").name == "numpy, tiles"
    assert model.numpy_backend("float64").linear is model.plain_product
    for pay, name in (True, "numpy, tiles"), (False, "numpy, plain"):
        monkeypatch.setattr(model, "tiles_pay", lambda pay=pay: pay)
        assert model.numpy_backend().name == name
    with pytest.raises(ValueError, match="the ways to multiply"):
        model.numpy_backend("float32", "magic")


def test_whether_tiles_pay_is_measured(monkeypatch):
    for plain, tiled in itertools.product((1.0, 2.0), (1.5,)):
        times = itertools.cycle((plain, tiled))
        monkeypatch.setattr(model, "_seconds", lambda f, x, times=times: next(times))
        assert model.tiles_pay.__wrapped__() == (tiled < plain)
