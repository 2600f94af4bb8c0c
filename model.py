"""A transformer in one file: backend, checkpoint folder, families, KV cache, forward pass.

    target = load("weights/smollm2-135m-instruct")
    cache = target.new_cache(capacity=64)
    logits = target([1, 504, 3575], cache, rows=1)     # feeds 3 tokens, [1, V]
    logits = target([1, 504, 3575, 314], cache, rows=1)  # feeds only the fourth

Read it from the bottom: `Model.__call__` is one pass, the two block functions are the layers,
`FAMILIES` says where a new kind of model goes.

Shape letters: T new tokens in this call, S tokens seen (cached + new), D width, H query heads,
G key/value heads, C channels per head, F hidden width of the MLP, V vocabulary, L layers. There is
no batch axis anywhere: one sequence. q, k, v are attention heads here; distributions live in
minispec.py.

What this file does not do: sampling, speculation, training, batches of sequences, reading
quantized checkpoints (it packs float ones), sliding-window attention, mixtures of experts, and any
rope type other than default, linear and llama3. What is not implemented is refused by name when the
checkpoint is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# ---------------------------------------------------------------- backend


@dataclass(frozen=True)
class Backend:
    """Where arrays live and how they are multiplied; the forward pass knows nothing else.

    xp           a namespace with the functions of the Python array API standard
    device       what xp's creation functions take as `device`
    dtype        type of activations, and of weights unless to_device gives matrices a smaller one
    to_device    NumPy array on the host -> array on the device; integers stay integers
    to_numpy     array on the device -> NumPy array on the host
    synchronize  returns once all queued work is done (clocks need it)
    linear       (x [T, in], W [out, in]) -> x @ W.T [T, out]
    rows         (W [out, in], ids [T]) -> rows of W [T, in], in the type of activations
    empty        list of shapes -> places on the host that weights are read into, one for each
    prepare      called with the weights of a model once they are loaded
    during_pass  number of rows fed -> a context manager that surrounds their pass
    fuse         (f, xp, *arrays) -> f(xp, *arrays), elementwise; one kernel, where that saves time
    """

    name: str
    xp: Any
    device: Any
    dtype: Any
    to_device: Callable
    to_numpy: Callable
    synchronize: Callable
    linear: Callable
    rows: Callable
    empty: Callable
    prepare: Callable = lambda weights: None
    during_pass: Callable = lambda rows: contextlib.nullcontext()
    fuse: Callable = lambda f, xp, *arrays: f(xp, *arrays)


WAYS = ("auto", "plain", "tiles")


def numpy_backend(dtype: str = "float32", way: str | None = None) -> Backend:
    """NumPy on the CPU, in "float32", or in "float64" for tests that compare to 1e-10.

    way: how matrices are kept and multiplied, one of WAYS: "plain" leaves it to BLAS, "tiles" is
    explained below, "auto" (float32's default) takes the faster one of this machine. Float64's
    default is "plain", so that no test depends on a clock.
    """
    if dtype not in ("float32", "float64"):
        raise ValueError(f"the NumPy backend computes in float32 or float64, not {dtype}")
    way = way or ("auto" if dtype == "float32" else "plain")
    if way not in WAYS:
        raise ValueError(f"the ways to multiply are {', '.join(WAYS)}, not {way}")
    if way == "auto":
        way = "tiles" if tiles_pay() else "plain"

    def to_device(array):
        return array if array.dtype.kind in "iu" else np.asarray(array, dtype)

    place = f"numpy, {way}", np, "cpu", np.dtype(dtype), to_device, np.asarray, lambda: None
    if way == "plain":
        empty = partial(carve, dtype=np.dtype(dtype))
        return Backend(*place, plain_product, lambda W, ids: W[ids], empty)
    product = TiledProduct()
    return Backend(
        *place, product, Tiles.rows, partial(empty_tiles, dtype=np.dtype(dtype)), product.measure,
        lambda rows: one_blas_thread() if rows < MANY else contextlib.nullcontext(),
    )  # fmt: skip


def device_backend(name, xp, device, dtype: str, types, to_numpy, synchronize, **more) -> Backend:
    """One whose arrays are those of `xp`, on `device`. Activations and the cache are float32;
    dtype, one of `types`, is that of the matrices, which their rows of x take for the product."""
    if dtype not in types:
        raise ValueError(f"the {name} backend has the types {', '.join(types)}, not {dtype}")

    def to_device(array):
        if array.dtype.kind in "iu":
            return xp.asarray(array, device=device)
        kind = getattr(xp, dtype) if array.ndim == 2 else xp.float32
        # subtle: float32 on the host already, for Apple's GPUs know no float64.
        return xp.asarray(np.asarray(array, np.float32), dtype=kind, device=device)

    def linear(x, W):
        y = xp.matmul(xp.astype(x, W.dtype, copy=False), xp.permute_dims(W, (1, 0)))
        return xp.astype(y, xp.float32, copy=False)

    def rows(W, ids):
        return xp.astype(xp.take(W, ids, axis=0), xp.float32, copy=False)

    return Backend(
        f"{name}, {device}, {dtype}", xp, device, xp.float32, to_device, to_numpy, synchronize,
        linear, rows, partial(carve, dtype=np.dtype(np.float32)), **more,
    )  # fmt: skip


def torch_backend(dtype: str = "float32", device: str | None = None) -> Backend:
    """PyTorch on "cpu", "cuda" or "mps"; without a device, on a GPU where there is one."""
    xp, torch = _package("array_api_compat.torch", "mps"), _package("torch", "mps")
    there = dict(
        cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True
    )  # fmt: skip
    device = device or next(name for name in there if there[name])
    if not there.get(device):
        some = ", ".join(name for name in there if there[name])
        raise ValueError(f"torch finds no device {device} here: choose one of {some}")
    wait = getattr(torch, device).synchronize
    return device_backend(
        "torch", xp, device, dtype, ("float32", "float16", "bfloat16"),
        lambda x: x.cpu().numpy(), wait, during_pass=lambda rows: torch.inference_mode(),
    )  # fmt: skip


def cupy_backend(dtype: str = "float32", device: str | None = None) -> Backend:
    """CuPy on an NVIDIA GPU."""
    xp, cupy = _package("array_api_compat.cupy", "cuda"), _package("cupy", "cuda")
    if device not in (None, "cuda"):
        raise ValueError(f"the cupy backend is for cuda, not {device}")
    if not cupy.cuda.is_available():
        raise ValueError("cupy finds no NVIDIA GPU here: --backend numpy does without")
    wait = lambda: cupy.cuda.get_current_stream().synchronize()  # noqa: E731
    fused = cache(lambda f: cupy.fuse(kernel_name=f.__name__)(partial(f, xp)))
    return device_backend(
        "cupy", xp, cupy.cuda.Device(0), dtype, ("float32", "float16"), cupy.asnumpy, wait,
        fuse=lambda f, xp, *arrays: fused(f)(*arrays),
    )  # fmt: skip


def _package(name: str, extra: str):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        what = error.name or name
        raise ImportError(
            f"this backend needs {what}, which is not installed: pip install -e '.[{extra}]'"
        ) from None


def _numpy_on_cpu(dtype: str = "float32", device: str | None = None, way: str | None = None):
    if device not in (None, "cpu"):
        raise ValueError(f"the numpy backend is for cpu, not {device}: --backend torch or cupy")
    return numpy_backend(dtype, way)


def best_backend(dtype: str = "float32", device: str | None = None) -> Backend:
    """The first that works here: CuPy, PyTorch on a GPU, NumPy."""
    for make in cupy_backend, torch_backend:
        try:
            backend = make(dtype, device)
        except (ImportError, ValueError):
            continue
        if "cpu" not in (backend.device, device):
            return backend
    return _numpy_on_cpu(dtype, device)


# By the names of the command line: (dtype, device) -> backend.
BACKENDS = {
    "numpy": _numpy_on_cpu,
    "numpy-plain": partial(_numpy_on_cpu, way="plain"),
    "numpy-tiles": partial(_numpy_on_cpu, way="tiles"),
    "cupy": cupy_backend,
    "torch": torch_backend,
    "auto": best_backend,
}
DEVICES, DTYPES = ("cpu", "cuda", "mps"), ("float32", "float16", "bfloat16")

# ---------------------------------------------------------------- matrix products on NumPy

# Speculative decoding lives from one fact: weights are read from memory once, however many rows
# they are multiplied with. BLAS does not honour it for a few rows. From two rows on it first copies
# the whole matrix into another order ("packs" it), which costs more than the product: the packing
# pays for hundreds of rows, not for K + 1. So here W is packed once, when it is loaded: tile i is
# the transpose of rows 32 i to 32 i + 31 of W, and a product is one np.matmul over the stack of
# tiles, each of them small enough for the kernels of BLAS that do not pack again.

FEW, MANY = 16, 64  # rows of x: up to FEW are measured, from MANY on BLAS's own threads do as well
TILE = 32  # rows of W in a tile: two AVX-512 registers
WIDEST = 10**6 // (FEW * TILE)  # OpenBLAS does not pack while rows x tile x in is at most 10^6


def plain_product(x, W):  # [T, in], [out, in] -> [T, out]
    return np.matmul(x, W.T)


class Tiles:
    """A matrix W [out, in], kept as a stack [n, in, TILE]; zeros fill the last tile.

    >>> (W,) = empty_tiles([(40, 3)], np.float32)
    >>> W[0:40] = np.arange(120).reshape(40, 3)
    >>> W.stack[1, :, :9].astype(int).tolist()[0]
    [96, 99, 102, 105, 108, 111, 114, 117, 0]
    >>> W.rows([33]).astype(int).tolist()
    [[99, 100, 101]]
    """

    ndim = 2

    def __init__(self, stack: np.ndarray, out: int):
        self.stack, self.shape, self.nbytes = stack, (out, stack.shape[1]), stack.nbytes

    def __setitem__(self, where, block):
        """W[rows] = block, or W[rows, columns] = block."""
        rows, columns = where if isinstance(where, tuple) else (where, slice(None))
        i = np.arange(self.shape[0])[rows]
        self.stack[i // TILE, columns, i % TILE] = block

    def rows(self, ids) -> np.ndarray:  # -> [len(ids), in]
        i = np.asarray(ids)
        return self.stack[i // TILE, :, i % TILE]


def empty_tiles(shapes: list[tuple[int, ...]], dtype: np.dtype) -> list:
    """Places for a layer's weights: matrices as Tiles, vectors as they are."""
    kept = [(-(-s[0] // TILE), s[1], TILE) if len(s) == 2 else s for s in shapes]
    stacks = carve(kept, dtype)
    for stack in stacks:
        stack[-1:] = 0  # what fills the last tile
    return [Tiles(a, s[0]) if len(s) == 2 else a for a, s in zip(stacks, shapes)]


class SecondThread:
    """One thread beside the caller's: submit(function, *args) -> a future, as of an executor."""

    def __init__(self):
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="minispec")

    def submit(self, *task):
        return self.pool.submit(*task)


SECOND_THREAD = SecondThread()
if hasattr(os, "register_at_fork"):  # threads are not forked: without this, a child would wait
    os.register_at_fork(after_in_child=SECOND_THREAD.__init__)
OWN_SHARE = 0.56  # of a product on two threads; the second one starts late


def one_blas_thread():
    """A context in which BLAS uses the calling thread only.

    subtle: after each product, OpenBLAS's own threads spin for the next one, on the very core that
    our second thread needs.
    """
    return _blas().limit(limits=1, user_api="blas")


@cache
def _blas():
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


class TiledProduct:
    """x @ W.T for a W of Tiles.

    `measure` finds, for each shape of W and each of the FEW row counts, whether a second thread
    pays, and how many rows to compute: six are often faster than five, for kernels come in steps.
    """

    ROWS, TRIES, SAMPLE = (1, 2, 3, 4, 5, 6, 8, 10, 12, FEW), 5, 1 << 22

    def __init__(self):
        self.best: dict[tuple, tuple[int, int]] = {}  # (T, shape of W) -> rows, threads
        self.milliseconds: dict[int, dict[int, float]] = {}  # rows -> threads -> a layer's products

    def __call__(self, x, W):  # [T, in], [out, in] -> [T, out]
        T, (out, width) = x.shape[0], W.shape
        rows, threads = self.best.get((T, W.shape), (T, 2 if T < MANY else 1))
        if rows > T:
            x = np.concat([x, np.zeros((rows - T, width), x.dtype)], axis=0)
        return self.product(x, W.stack, threads)[:T, :out]

    def product(self, x, stack, threads):  # [T, in], [n, in, TILE] -> [T, n TILE]
        T, n = x.shape[0], stack.shape[0]
        y = np.empty((T, n * TILE), x.dtype)
        out = np.moveaxis(np.reshape(y, (T, n, TILE)), 1, 0)  # tile i fills TILE columns of y
        if T == 1:  # vectors, so that BLAS's matrix x vector is used
            x, out = x[0, :], out[:, 0, :]
        if threads == 1:
            _multiply(x, stack, out)
        else:
            own = round(OWN_SHARE * n)
            second = SECOND_THREAD.submit(_multiply, x, stack[own:], out[own:])
            _multiply(x, stack[:own], out[:own])
            second.result()
        return y

    def measure(self, weights: dict):
        """Every row count and new shape, on one thread and on two; the best of TRIES.

        One try of everything, then the next of everything, each on another layer's weights: no try
        finds its weights in the cache, and a bad moment cannot decide.
        """
        layers = [[W for W in w.values() if W.ndim == 2] for w in weights["layers"]]
        others = [W for name, W in weights.items() if name != "layers" and W.ndim == 2]
        groups = (
            [W for W in (*layer, *others) if (1, W.shape) not in self.best] for layer in layers
        )
        matrices = itertools.cycle(list(groups))
        threads = (1, 2) if (os.cpu_count() or 1) > 1 else (1,)
        spent: dict[tuple, float] = {}
        with one_blas_thread():
            for attempt, rows, n in itertools.product(range(self.TRIES), self.ROWS, threads):
                for W in next(matrices):
                    seconds = self._try(W, rows, n, attempt)
                    key = rows, n, W.shape
                    spent[key] = min(seconds, spent.get(key, math.inf))
        for shape in {shape for _, _, shape in spent}:
            for T in range(1, FEW + 1):
                ways = itertools.product((rows for rows in self.ROWS if rows >= T), threads)
                # subtle: the plainest way unless another is clearly faster, for a hand-over costs
                # more inside a pass, where the second thread has had time to fall asleep.
                cost = {(r, n): spent[r, n, shape] * (0.9 + 0.1 * n) for r, n in ways}
                self.best[T, shape] = min(cost, key=cost.get)
        self.milliseconds = self.milliseconds or {
            rows: {n: 1e3 * sum(spent[rows, n, W.shape] for W in layers[0]) for n in threads}
            for rows in self.ROWS
        }

    def _try(self, W, rows: int, threads: int, attempt: int) -> float:
        """Seconds of a product; a large matrix is measured in part, in another part each time."""
        tiles = min(len(W.stack), max(2, self.SAMPLE // W.stack[0].size))
        start = attempt * tiles if (attempt + 1) * tiles <= len(W.stack) else 0
        x = np.ones((rows, W.shape[1]), W.stack.dtype)
        seconds = _seconds(self.product, x, W.stack[start : start + tiles], threads)
        return seconds * len(W.stack) / tiles


def _multiply(x, stack, out):  # [(T,) in], [n, in, TILE] -> out [n, (T,) TILE]
    width = stack.shape[1]
    parts = -(-width // WIDEST)  # a product that is too wide is a sum of narrower ones
    edges = [width * i // parts for i in range(parts + 1)]
    np.matmul(x[..., : edges[1]], stack[:, : edges[1], :], out)
    for a, b in itertools.pairwise(edges[1:]):
        out += np.matmul(x[..., a:b], stack[:, a:b, :])


@cache
def tiles_pay() -> bool:
    """True where tiles beat this machine's BLAS: one row and five, through 28 MB of weights."""
    shape, copies = (1536, 576), 8
    weights = [np.ones(shape, np.float32) for _ in range(copies)]
    tiles = [np.ones((shape[0] // TILE, shape[1], TILE), np.float32) for _ in range(copies)]
    product, rows = TiledProduct().product, (1, 5)
    x = {T: np.ones((T, shape[1]), np.float32) for T in rows}
    plain, tiled = ({T: math.inf for T in rows} for _ in range(2))
    for T in rows * 3:
        plain[T] = min(plain[T], _seconds(lambda x: [plain_product(x, W) for W in weights], x[T]))
        with one_blas_thread():
            tiled[T] = min(tiled[T], _seconds(lambda x: [product(x, W, 1) for W in tiles], x[T]))
    return sum(tiled.values()) < sum(plain.values())


def _seconds(function, *args) -> float:
    started = time.perf_counter()
    function(*args)
    return time.perf_counter() - started


# ---------------------------------------------------------------- 4-bit weights

# W = scale * code + minimum, with one scale and one minimum for each GROUP of weights along the
# input (as llama.cpp's Q4_1 has it). They need not be multiplied out, since
#     x . w = sum over the groups g of  scale_g (x_g . code_g) + minimum_g (sum of x_g).
# So a product unpacks nothing but codes, a block at a time, and once for all the rows of x.

GROUP = 32
BLOCK = 1 << 19  # codes unpacked at a time: few calls, and as float32 they stay in the cache


class Packed:
    """A matrix W [out, in] as codes of 4 or 8 bits, with float16 scales and minima.

    blocks: (codes, scale, minimum) of so many rows of W each. With G = in / GROUP, rounded up:
    scale and minimum [G, rows], codes [G, GROUP, rows]; of 4 bits, the first half of a group lies
    in the low halves of its bytes [G, GROUP / 2, rows], the second half in the high ones.

    >>> W = Packed(np.array([[0.0, 1.0, 15.0], [3.0, 3.0, 3.0]]), bits=4)
    >>> W.rows([1, 0]).tolist()
    [[3.0, 3.0, 3.0], [0.0, 1.0, 15.0]]
    """

    ndim = 2

    def __init__(self, W, bits: int):
        self.shape, self.bits = W.shape, bits
        self.step = max(TILE, BLOCK // W.shape[1] // TILE * TILE)  # rows of W in a block
        starts = range(0, W.shape[0], self.step)
        runs = (range(a, min(a + self.step, W.shape[0])) for a in starts)
        self.blocks = [pack(W.rows(run) if isinstance(W, Tiles) else W[run], bits) for run in runs]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for block in self.blocks for array in block)

    def rows(self, ids) -> np.ndarray:  # -> [len(ids), in]
        found = np.empty((len(ids), self.shape[1]), np.float32)
        for i, row in enumerate(ids):
            j = row % self.step
            codes, scale, minimum = (a[..., j : j + 1] for a in self.blocks[row // self.step])
            w = unpack(codes, self.bits) * scale[:, None, :] + minimum[:, None, :]
            found[i] = w.reshape(-1)[: self.shape[1]]
        return found

    def product(self, x):  # [T, in] -> x @ W.T [T, out]
        T, width = x.shape
        x = np.pad(x, ((0, 0), (0, -width % GROUP)))
        groups = np.moveaxis(np.reshape(x, (T, -1, GROUP)), 1, 0)  # [G, T, GROUP]
        sums = np.ascontiguousarray(np.sum(groups, axis=2).T)  # [T, G]

        def multiply(blocks):
            return [_multiply_packed(groups, sums, block, self.bits) for block in blocks]

        half = (len(self.blocks) + 1) // 2
        # subtle: from so many rows on BLAS would start its threads in both of ours, and all wait.
        with one_blas_thread() if T > FEW else contextlib.nullcontext():
            second = SECOND_THREAD.submit(multiply, self.blocks[half:])
            y = multiply(self.blocks[:half]) + second.result()
        return np.concat(y, axis=1)


def _multiply_packed(groups, sums, block, bits):  # [G, T, GROUP], [T, G] -> [T, rows]
    codes, scale, minimum = block
    y = np.matmul(groups, unpack(codes, bits))  # [G, T, rows]
    y *= scale.astype(y.dtype)[:, None, :]
    return np.sum(y, axis=0) + np.matmul(sums, minimum.astype(y.dtype))


def pack(W, bits: int) -> tuple:
    """Some rows of a matrix, [rows, in] -> codes, scale, minimum, as `Packed` has them."""
    rows, width = W.shape
    W = np.pad(W, ((0, 0), (0, -width % GROUP)), mode="edge")
    groups = W.T.reshape(-1, GROUP, rows)
    low, high = np.min(groups, axis=1), np.max(groups, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):  # refused in the next line
        scale = ((high - low) / (2**bits - 1)).astype(np.float16)
        minimum = low.astype(np.float16)
    if not (np.isfinite(scale).all() and np.isfinite(minimum).all()):
        raise ValueError("cannot be packed: a weight is not a number, or beyond float16's 65504")
    divisor = np.where(scale > 0, scale, np.inf).astype(W.dtype)[:, None, :]
    codes = (groups - minimum[:, None, :].astype(W.dtype)) / divisor
    codes = np.clip(np.rint(codes), 0, 2**bits - 1).astype(np.uint8)
    if bits == 4:
        codes = codes[:, : GROUP // 2, :] | codes[:, GROUP // 2 :, :] << 4
    # subtle: until here all lie in memory as W.T does, and would be unpacked three times slower.
    return tuple(np.ascontiguousarray(part) for part in (codes, scale, minimum))


def unpack(codes, bits: int):  # codes as they are kept -> [G, GROUP, rows] float32
    if bits == 8:
        return codes.astype(np.float32)
    unpacked = np.empty((len(codes), GROUP, codes.shape[2]), np.float32)
    unpacked[:, : GROUP // 2, :] = codes & 15
    unpacked[:, GROUP // 2 :, :] = codes >> 4
    return unpacked


def quantize(model: Model) -> Model:
    """The same model with weights of 4 bits (5 with scale and minimum), embedding and head of 8.

    Raises ValueError for weights that are not on the NumPy backend, in 4 bits already, or not
    within float16.
    """
    backend = model.backend
    if backend.xp is not np or isinstance(model.weights["embed"], Packed):
        raise ValueError(
            f"only float weights on the NumPy backend go into int4, not {backend.name}"
        )

    # A draft on the same backend has weights that are not packed.
    def linear(x, W):
        return W.product(x) if isinstance(W, Packed) else backend.linear(x, W)

    def rows(W, ids):
        return W.rows(ids) if isinstance(W, Packed) else backend.rows(W, ids)

    def packed(w, bits, names):
        return {k: Packed(W, bits) if k in names and W.ndim == 2 else W for k, W in w.items()}

    weights = packed(model.weights, 8, ("embed", "head"))
    weights["layers"] = [packed(layer, 4, layer) for layer in model.weights["layers"]]
    new = dataclasses.replace(backend, name=f"{backend.name}, int4", linear=linear, rows=rows)
    return Model(model.config, weights, new, model.block)


def verify_serially(model: Model) -> Model:
    """The same weights, but up to FEW rows are multiplied one after another.

    So does a backend whose quantized kernel multiplies a matrix with one vector: it unpacks the
    weights for every row again. The pair of the two isolates what a parallel verification is worth.
    """
    inner = model.backend.linear

    def linear(x, W):
        if 1 < x.shape[0] <= FEW:
            return np.concat([inner(x[i : i + 1, :], W) for i in range(x.shape[0])])
        return inner(x, W)

    new = dataclasses.replace(model.backend, name=f"{model.backend.name} serial", linear=linear)
    return Model(model.config, model.weights, new, model.block)


def first_layers(model: Model, layers: int) -> Model:
    """The same weights, but the norm and the head follow on the first `layers` layers.

    Raises ValueError unless there is at least one layer, and at least one is left out.
    """
    whole = model.config.layers
    if not 1 <= layers < whole:
        raise ValueError(f"an early exit is after layer 1 to {whole - 1} of {whole}, not {layers}")
    weights = model.weights | {"layers": model.weights["layers"][:layers]}
    config = dataclasses.replace(model.config, layers=layers)
    return Model(config, weights, model.backend, model.block)


# ---------------------------------------------------------------- what a config.json says


@dataclass(frozen=True)
class Config:
    """Every number that the forward pass needs, under this file's own names.

    `absent` lists the optional weights (keys of the family's table) that this checkpoint does not
    have: biases, the norms of single heads, the head of a tied model. `inv_freq` [C / 2] holds the
    rotary angle per position, and is empty where positions are learned.
    """

    layers: int  # L
    width: int  # D
    heads: int  # H
    kv_heads: int  # G
    head_dim: int  # C
    hidden: int  # F
    vocab: int  # V
    context: int  # most tokens in one sequence
    eps: float
    inv_freq: tuple[float, ...]
    absent: frozenset[str]
    head_rows: int = 0  # N; tokens that a draft with a trimmed head can propose

    def size(self, letters: str) -> int:
        """The number behind the letters of a shape: products such as 'HC' or '3D' included.

        >>> gpt2_config(dict(n_embd=12, n_head=3, n_layer=1, vocab_size=7)).size("3D")
        36
        """
        numbers = dict(
            D=self.width, H=self.heads, G=self.kv_heads, C=self.head_dim, F=self.hidden,
            V=self.vocab, P=self.context, N=self.head_rows,
        )  # fmt: skip
        return math.prod(int(c) if c.isdigit() else numbers[c] for c in letters)


KINDS = {
    "count": ("a positive integer", lambda v: type(v) is int and v > 0),
    "number": ("a number > 0", lambda v: type(v) in (int, float) and 0 < v < math.inf),
    "flag": ("true or false", lambda v: type(v) is bool),
}


def _read(raw: dict, key: str, kind: str, default: object = None):
    """The value of a key, of a kind of KINDS; an absent key and null mean the default."""
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise ValueError(f"config.json has no {key!r}, which this model needs")
    rule, holds = KINDS[kind]
    _check(holds(value), f"{key} must be {rule}", value)
    return value


def _check(holds: bool, rule: str, got: object):
    if not holds:
        raise ValueError(f"config.json: {rule}, got {got!r}")


def llama_config(raw: dict) -> Config:
    """config.json of Llama and its relatives -> Config."""
    context = _read(raw, "max_position_embeddings", "count")
    window = context
    if _read(raw, "use_sliding_window", "flag", raw.get("sliding_window") is not None):
        window = _read(raw, "sliding_window", "count", 4096)
    _check(window >= context, "sliding-window attention is not implemented", f"window {window}")
    act = raw.get("hidden_act", "silu")
    _check(act == "silu", "hidden_act must be silu", act)
    width, heads = _read(raw, "hidden_size", "count"), _read(raw, "num_attention_heads", "count")
    head_dim = _read(raw, "head_dim", "count", max(1, width // heads))
    kv_heads = _read(raw, "num_key_value_heads", "count", heads)
    _check(heads % kv_heads == 0, f"num_key_value_heads must divide {heads} heads", kv_heads)
    attention_bias = _read(raw, "attention_bias", "flag", False)
    mlp_bias = _read(raw, "mlp_bias", "flag", False)
    present = {
        "head": not _read(raw, "tie_word_embeddings", "flag", False),
        "qkv_bias": raw.get("qkv_bias", attention_bias),
        "o_bias": attention_bias,
        "gate_up_bias": mlp_bias,
        "down_bias": mlp_bias,
        "q_norm": raw.get("qk_norm", False),
        "k_norm": raw.get("qk_norm", False),
    }
    return Config(
        layers=_read(raw, "num_hidden_layers", "count"),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=_read(raw, "intermediate_size", "count"),
        vocab=_read(raw, "vocab_size", "count"),
        context=context,
        eps=_read(raw, "rms_norm_eps", "number", 1e-6),
        inv_freq=rope_frequencies(raw, head_dim),
        absent=frozenset(name for name, there in present.items() if not there),
    )


# The relatives differ in what their files leave unsaid; "qkv_bias" and "qk_norm" are our own words.


def mistral_config(raw: dict) -> Config:
    # A file that is silent about its sliding window means 4096; one that says null means none.
    return llama_config({"sliding_window": 4096, **raw})


def qwen2_config(raw: dict) -> Config:
    # Biases on q, k, v and none on o. A window's size is always named, in use or not.
    always = {"qkv_bias": True, "attention_bias": False}
    return llama_config({"use_sliding_window": False, **raw, **always})


def qwen3_config(raw: dict) -> Config:
    return llama_config({"use_sliding_window": False, "head_dim": 128, **raw, "qk_norm": True})


def gpt2_config(raw: dict) -> Config:
    """config.json of GPT-2 -> Config."""
    act = raw.get("activation_function", "gelu_new")
    _check(act in ("gelu_new", "gelu_pytorch_tanh"), "activation_function must be gelu_new", act)
    usual = dict(
        scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )
    for key, value in usual.items():
        _check(raw.get(key, value) == value, f"{key} must be {value}", raw.get(key))
    width, heads = _read(raw, "n_embd", "count"), _read(raw, "n_head", "count")
    _check(width % heads == 0, f"n_head must divide n_embd, {width}", heads)
    tied = _read(raw, "tie_word_embeddings", "flag", True)
    return Config(
        layers=_read(raw, "n_layer", "count"),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        hidden=_read(raw, "n_inner", "count", 4 * width),
        vocab=_read(raw, "vocab_size", "count"),
        context=_read(raw, "n_positions", "count", raw.get("n_ctx", 1024)),
        eps=_read(raw, "layer_norm_epsilon", "number", 1e-5),
        inv_freq=(),
        absent=frozenset({"head"} if tied else ()),
    )


def rope_frequencies(raw: dict, head_dim: int) -> tuple[float, ...]:
    """Rotary angle per position, [C / 2]: theta^(-2i/C), rescaled as the config.json asks.

    "linear" divides every frequency by `factor`. "llama3" (Llama 3.1's long-context rule) leaves
    the fast ones, divides the slow ones, and goes over smoothly between the two.

    >>> rope_frequencies({"rope_theta": 100.0}, 4)
    (1.0, 0.1)
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    _check(isinstance(rope, dict), "rope parameters must be an object", rope)
    rope = {"rope_theta": raw.get("rope_theta"), **rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    _check(kind in ("default", "linear", "llama3"), "rope type: default, linear or llama3", kind)
    for source in (raw, rope):
        share = _read(source, "partial_rotary_factor", "number", 1.0)
        _check(share == 1, "partial_rotary_factor must be 1", share)
    _check(head_dim % 2 == 0 and head_dim <= 2**14, "head_dim must be even, at most 2^14", head_dim)
    f = _read(rope, "rope_theta", "number", 10000.0) ** (-np.arange(0, head_dim, 2) / head_dim)
    if kind == "linear":
        f = f / _read(rope, "factor", "number")
    if kind == "llama3":
        low, high = (
            _read(rope, "low_freq_factor", "number"),
            _read(rope, "high_freq_factor", "number"),
        )
        _check(low < high, f"low_freq_factor must be below high_freq_factor, {high}", low)
        turns = _read(rope, "original_max_position_embeddings", "number") * f / (2 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0, 1)
        f = keep * f + (1 - keep) * f / _read(rope, "factor", "number")
    return tuple(f.tolist())


# ---------------------------------------------------------------- names of the weights in the files

# One row: our name, the name in the file ({l} = layer; a prefix of PREFIXES may stand before it),
# and the shape there. Rows of one name are joined along the first axis, so that q, k and v are one
# product, gate and up another. "T" marks a matrix stored [in, out]; ours are all [out, in].
PREFIXES = ("", "model.", "transformer.")

LLAMA_WEIGHTS = (
    ("embed", "embed_tokens.weight", "V D"),
    ("attn_norm", "layers.{l}.input_layernorm.weight", "D"),
    ("qkv", "layers.{l}.self_attn.q_proj.weight", "HC D"),
    ("qkv", "layers.{l}.self_attn.k_proj.weight", "GC D"),
    ("qkv", "layers.{l}.self_attn.v_proj.weight", "GC D"),
    ("qkv_bias", "layers.{l}.self_attn.q_proj.bias", "HC"),
    ("qkv_bias", "layers.{l}.self_attn.k_proj.bias", "GC"),
    ("qkv_bias", "layers.{l}.self_attn.v_proj.bias", "GC"),
    ("q_norm", "layers.{l}.self_attn.q_norm.weight", "C"),
    ("k_norm", "layers.{l}.self_attn.k_norm.weight", "C"),
    ("o", "layers.{l}.self_attn.o_proj.weight", "D HC"),
    ("o_bias", "layers.{l}.self_attn.o_proj.bias", "D"),
    ("mlp_norm", "layers.{l}.post_attention_layernorm.weight", "D"),
    ("gate_up", "layers.{l}.mlp.gate_proj.weight", "F D"),
    ("gate_up", "layers.{l}.mlp.up_proj.weight", "F D"),
    ("gate_up_bias", "layers.{l}.mlp.gate_proj.bias", "F"),
    ("gate_up_bias", "layers.{l}.mlp.up_proj.bias", "F"),
    ("down", "layers.{l}.mlp.down_proj.weight", "D F"),
    ("down_bias", "layers.{l}.mlp.down_proj.bias", "D"),
    ("norm", "norm.weight", "D"),
    ("head", "lm_head.weight", "V D"),
)

# A draft conditioned on the target's states: it has no embedding of its own, and a head of only N
# tokens, whose ids are stored beside it.
DRAFT_WEIGHTS = (
    ("embed_norm", "embed_norm.weight", "D"),
    ("state_norm", "state_norm.weight", "D"),
    ("join", "join.weight", "D 2D"),
    *(row for row in LLAMA_WEIGHTS if row[0] not in ("embed", "head")),
    ("head", "lm_head.weight", "N D"),
    ("head_ids", "lm_head.ids", "N"),
)

GPT2_WEIGHTS = (
    ("embed", "wte.weight", "V D"),
    ("positions", "wpe.weight", "P D"),
    ("attn_norm", "h.{l}.ln_1.weight", "D"),
    ("attn_norm_bias", "h.{l}.ln_1.bias", "D"),
    ("qkv", "h.{l}.attn.c_attn.weight", "D 3D T"),
    ("qkv_bias", "h.{l}.attn.c_attn.bias", "3D"),
    ("o", "h.{l}.attn.c_proj.weight", "D D T"),
    ("o_bias", "h.{l}.attn.c_proj.bias", "D"),
    ("mlp_norm", "h.{l}.ln_2.weight", "D"),
    ("mlp_norm_bias", "h.{l}.ln_2.bias", "D"),
    ("up", "h.{l}.mlp.c_fc.weight", "D F T"),
    ("up_bias", "h.{l}.mlp.c_fc.bias", "F"),
    ("down", "h.{l}.mlp.c_proj.weight", "F D T"),
    ("down_bias", "h.{l}.mlp.c_proj.bias", "D"),
    ("norm", "ln_f.weight", "D"),
    ("norm_bias", "ln_f.bias", "D"),
    ("head", "lm_head.weight", "V D"),
)


# ---------------------------------------------------------------- reading a checkpoint folder

BYTES_PER_NUMBER = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
LARGEST_HEADER = 100_000_000  # bytes; the limit of the format's own reader
PIECE = 1 << 20  # numbers converted at a time


class Stored(NamedTuple):
    """Where one tensor lies: file, type ("F16"), shape, its bytes start..end in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_json(path: Path) -> dict:
    """A JSON object from a file; ValueError that names the file if it is not one."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}: not a checkpoint folder?")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fetch it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def safetensors_header(path: Path) -> dict[str, Stored]:
    """The table of one .safetensors file: 8 bytes of header length, JSON header, data.

    Read here and not through the safetensors package, because that maps the whole file into memory
    (half of float32's size again at the peak) and has no bfloat16 for NumPy.

    Raises ValueError for a file that is cut short, or whose header does not describe its data.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER):
            raise ValueError(f"{path} is truncated or no safetensors file: fetch it again")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {key: _entry(path, e, 8 + length) for key, e in header.items()}
            _check_cover(tensors, 8 + length, size)
            return tensors
        except (AttributeError, LookupError, TypeError, RecursionError, ValueError):
            raise ValueError(
                f"{path} is truncated, or its header is damaged: fetch it again"
            ) from None


def _entry(path: Path, entry: dict, data: int) -> Stored:
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise TypeError("sizes must be natural numbers")
    if dtype in BYTES_PER_NUMBER and end - start != math.prod(shape) * BYTES_PER_NUMBER[dtype]:
        raise ValueError("the shape does not fit the number of bytes")
    return Stored(path, dtype, shape, data + start, data + end)


def _check_cover(tensors: dict[str, Stored], data: int, size: int):
    # The tensors must fill the file without holes or overlaps: nothing else tells shifted numbers.
    for start, end in sorted((t.start, t.end) for t in tensors.values()):
        if start != data or end < start:
            raise ValueError("tensors overlap, or leave a hole")
        data = end
    if data != size:
        raise ValueError("the tensors end before or after the file does")


def checkpoint_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder: of model.safetensors, or of the shards that its index names."""
    if (folder / "model.safetensors").is_file():
        return safetensors_header(folder / "model.safetensors")
    if not (folder / "model.safetensors.index.json").is_file():
        raise FileNotFoundError(f"{folder} has no model.safetensors, the only format that is read")
    index = read_json(folder / "model.safetensors.index.json").get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(n, str) for n in index.values()):
        raise ValueError(f"{folder}/model.safetensors.index.json has no usable weight_map")
    tensors = {}
    for name in sorted(set(index.values())):
        if name != Path(name).name or name in ("", ".", ".."):
            raise ValueError(f"{folder}: the index names {name!r}, no file of that folder")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing, though the index names it")
        tensors |= safetensors_header(folder / name)
    return tensors


def read_into(stored: Stored, matrix, a: int, transposed: bool):
    """Fill `matrix` (an array or Tiles) from row `a` on, a million numbers at a time."""
    width = math.prod(stored.shape[1:])
    step = max(1, PIECE // max(1, width))
    with stored.file.open("rb") as file:
        file.seek(stored.start)
        for start in range(0, stored.shape[0], step):
            end = min(start + step, stored.shape[0])
            data = file.read((end - start) * width * BYTES_PER_NUMBER[stored.dtype])
            piece = _numbers(data, stored.dtype).reshape(end - start, *stored.shape[1:])
            if transposed:
                matrix[a : a + width, start:end] = piece.T
            else:
                matrix[a + start : a + end] = piece


def _numbers(data: bytes, dtype: str) -> np.ndarray:
    """Little-endian bytes -> floats. NumPy has no bfloat16: it is the upper half of a float32.

    >>> _numbers(bytes([0x49, 0xC0]), "BF16").tolist()
    [-3.140625]
    """
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype])


class Part(NamedTuple):
    """One row of a weight table, found in the files: `stored` fills the rows a:b of our matrix."""

    stored: Stored
    a: int
    b: int
    transposed: bool


def plan(config: Config, table: tuple, tensors: dict[str, Stored]) -> dict[tuple, list[Part]]:
    """(our name, layer or None) -> its parts, with presence, type and shape of each checked.

    Nothing is read or allocated before the whole plan stands.
    """
    parts: dict[tuple, list[Part]] = {}
    for name, pattern, letters in table:
        if name in config.absent:
            continue
        for l in range(config.layers) if "{l}" in pattern else [None]:
            stored = _find(tensors, pattern.format(l=l))
            *dims, transposed = letters.split() if letters.endswith("T") else (*letters.split(), "")
            shape = tuple(config.size(d) for d in dims)
            if stored.shape != shape:
                raise ValueError(
                    f"{stored.file}: {pattern.format(l=l)} has shape {list(stored.shape)}, "
                    f"config.json asks for {list(shape)}"
                )
            rows = parts.setdefault((name, l), [])
            a = rows[-1].b if rows else 0
            rows.append(Part(stored, a, a + shape[1 if transposed else 0], bool(transposed)))
    return parts


def _find(tensors: dict[str, Stored], key: str) -> Stored:
    for name in (prefix + key for prefix in PREFIXES):
        if name in tensors:
            if tensors[name].dtype not in BYTES_PER_NUMBER:
                raise ValueError(
                    f"{tensors[name].file}: {name} has type {tensors[name].dtype}; "
                    f"only {', '.join(BYTES_PER_NUMBER)} are read"
                )
            return tensors[name]
    files = sorted({str(t.file) for t in tensors.values()}) or ["the checkpoint"]
    raise ValueError(f"{', '.join(files)}: no tensor named {key}")


def read_weights(parts: dict[tuple, list[Part]], layers: int, backend: Backend) -> dict:
    """Read every weight to the backend, one layer at a time: {"embed": ..., "layers": [{...}]}."""
    weights: dict = {"layers": [{} for _ in range(layers)]}
    for l in (None, *range(layers)):
        names = [name for name, layer in parts if layer == l]
        places = backend.empty([_shape(parts[name, l]) for name in names])
        for name, place in zip(names, places):
            for stored, a, _, transposed in parts[name, l]:
                read_into(stored, place, a, transposed)
            if not isinstance(place, Tiles):
                place = backend.to_device(place)
            (weights if l is None else weights["layers"][l])[name] = place
    return weights


def _shape(rows: list[Part]) -> tuple[int, ...]:
    stored = rows[0].stored.shape[::-1] if rows[0].transposed else rows[0].stored.shape
    return rows[-1].b, *stored[1:]


def carve(shapes: list[tuple[int, ...]], dtype: np.dtype) -> list[np.ndarray]:
    """Empty arrays that are views of one allocation.

    Linux gives NumPy huge pages for allocations of 4 MB and more only; reading all weights once was
    10 % faster with them. Every array begins at a multiple of 64 bytes from the first.
    """
    sizes = [-(-math.prod(shape) // 16) * 16 for shape in shapes]
    buffer = np.empty(sum(sizes), dtype)
    starts = itertools.accumulate(sizes, initial=0)
    return [
        buffer[start : start + math.prod(shape)].reshape(shape)
        for start, shape in zip(starts, shapes)
    ]


def check_memory(parts: dict[tuple, list[Part]], folder: Path):
    """Refuse, before anything is read, weights that as float32 exceed this machine's memory."""
    numbers = sum(math.prod(part.stored.shape) for rows in parts.values() for part in rows)
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * numbers > have:
        raise MemoryError(
            f"{folder} needs {4 * numbers / 1e9:.1f} GB as float32, this machine has "
            f"{have / 1e9:.1f} GB: choose a smaller model"
        )


def load(folder: str | Path, backend: Backend | None = None) -> Model:
    """The model in a Hugging Face checkpoint folder (config.json and safetensors).

    Raises FileNotFoundError for missing files, MemoryError for a model larger than the machine, and
    ValueError for everything that is damaged, not implemented, or not as config.json says.
    """
    folder, backend = Path(folder), backend or numpy_backend()
    raw = read_json(folder / "config.json")
    family = FAMILIES.get(raw.get("model_type")) if isinstance(raw.get("model_type"), str) else None
    if family is None:
        kind, known = raw.get("model_type"), ", ".join(FAMILIES)
        raise ValueError(f"{folder}: model_type {kind!r} is not implemented; known: {known}")
    config, weights = _read_folder(folder, raw, family, backend)
    backend.prepare(weights)
    return Model(config, weights, backend, family.block)


def load_draft(folder: str | Path, target: Model) -> StateDraftModel:
    """A draft that was trained for `target` and works on its backend, with its embedding.

    Raises ValueError, beside what `load` raises, when it was made for a model of another shape.
    """
    folder = Path(folder)
    raw = read_json(folder / "config.json")
    facts = raw.get("target")
    for key in ("layers", "width", "heads", "kv_heads", "hidden", "vocab"):
        made_for = facts.get(key) if isinstance(facts, dict) else None
        if made_for != getattr(target.config, key):
            raise ValueError(
                f"{folder} is a draft for a target of {made_for} {key}, this one has "
                f"{getattr(target.config, key)}: choose another draft, or --draft ngram"
            )
    config, weights = _read_folder(folder, raw, DRAFT, target.backend)
    if (config.width, config.vocab) != (target.config.width, target.vocab):
        raise ValueError(f"{folder}: a draft has the width and the vocabulary of its target")
    target.backend.prepare(weights)
    return StateDraftModel(config, weights, target)


def is_draft(folder: str | Path) -> bool:
    """True for a folder that load_draft reads, false for one that `load` reads."""
    return read_json(Path(folder) / "config.json").get("model_type") == "minispec_draft"


def _read_folder(folder: Path, raw: dict, family: Family, backend: Backend):
    if raw.get("quantization_config"):
        raise ValueError(f"{folder}: quantized checkpoints are not read; use an unquantized one")
    try:
        config = family.config(raw)
    except (TypeError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{folder}/config.json: a value of the wrong kind ({error})") from None
    parts = plan(config, family.weights, checkpoint_tensors(folder))
    check_memory(parts, folder)
    return config, read_weights(parts, config.layers, backend)


# ---------------------------------------------------------------- tokenizer


class Tokenizer:
    """The text side of a checkpoint folder: ids of a text, text of ids, chat template, stop ids.

    stop      ids that end a text: the union of what config.json, generation_config.json and
              tokenizer_config.json name, where each may name one, several or none
    template  the chat template's source, or None
    """

    def __init__(self, folder: str | Path):
        import tokenizers  # here, so that `import model` stays quick

        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json")
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{folder}/tokenizer.json is damaged ({error})") from None
        self.config = _json_if_there(folder / "tokenizer_config.json")
        self.template = self._find_template(folder)
        self.stop = self._find_stop(folder)

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, with the special tokens that the tokenizer itself puts around it."""
        return self._ids(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of ids, special tokens left out unless asked for."""
        return self.inner.decode(list(ids), skip_special_tokens=not special)

    def chat(self, prompt: str, system: str | None = None) -> list[int]:
        """Ids of a conversation's beginning: the prompt as the user's turn, the answer's opened.

        A model without a template, such as GPT-2, gets the plain text, system message first.
        Raises ValueError with the template's own words where it fails or refuses.
        """
        if self.template is None:
            return self.encode("\n\n".join(filter(None, (system, prompt))))
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        special = {name: self._token(name) or "" for name in ("bos_token", "eos_token")}
        try:
            text = (
                _template_box()
                .from_string(self.template)
                .render(messages=messages, add_generation_prompt=True, **special)
            )
        except Exception as error:  # a template is foreign code: it can fail in every way
            why = " ".join(str(error).split())
            raise ValueError(f"the chat template fails ({why}): --raw does without it") from None
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("the text is not valid UTF-8: convert it first") from None
        return self.inner.encode(text, add_special_tokens=add_special_tokens).ids

    def _find_template(self, folder: Path) -> str | None:
        if (folder / "chat_template.jinja").is_file():
            return (folder / "chat_template.jinja").read_text(encoding="utf-8")
        template = self.config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {t.get("name"): t.get("template") for t in template}.get("default")
        return template

    def _find_stop(self, folder: Path) -> frozenset[int]:
        named = [self.inner.token_to_id(self._token("eos_token") or "")]
        for file in ("config.json", "generation_config.json"):
            ids = _json_if_there(folder / file).get("eos_token_id")
            named += ids if isinstance(ids, list) else [ids]
        return frozenset(x for x in named if x is not None)

    def _token(self, name: str) -> str | None:
        token = self.config.get(name)
        return token.get("content") if isinstance(token, dict) else token


def _json_if_there(path: Path) -> dict:
    return read_json(path) if path.is_file() else {}


def _template_box():
    """What Hugging Face templates may use, in jinja2's sandbox: they are code from a download."""
    import jinja2.sandbox

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    box = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    box.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    box.globals["raise_exception"] = raise_exception
    box.globals["strftime_now"] = time.strftime
    return box


def same_vocabulary(ours: Tokenizer, theirs: Tokenizer) -> bool:
    """True if both give every id the same string."""
    return ours.inner.get_vocab() == theirs.inner.get_vocab()


ENOUGH_SHARED = 0.1  # of the target's tokens; a draft that can say fewer is of no use


def translation(target: Tokenizer, draft: Tokenizer) -> tuple[dict[int, int], Callable]:
    """What two tokenizers share, {target's id: draft's id}, and target's id -> the draft's ids that
    spell it: the longest token first, as far as the draft has its bytes.

    Raises ValueError where they share too little.
    """
    ours, theirs = token_bytes(target), {}
    for i, text in token_bytes(draft).items():
        theirs.setdefault(text, i)
    # Of two ids with the same bytes the first is the one that its tokenizer uses.
    first = {text: i for i, text in reversed(ours.items())}
    shared = {i: theirs[text] for text, i in first.items() if text in theirs}
    if len(shared) < ENOUGH_SHARED * len(ours):
        raise ValueError(
            f"draft and target have different vocabularies, with {len(shared)} of the target's "
            f"{len(ours)} tokens in common ({len(shared) / len(ours):.1%}), which is too few to "
            "draft with: choose a draft with the target's tokenizer, or --draft ngram"
        )
    longest = max(map(len, theirs))

    @cache
    def spell(x: int) -> tuple[int, ...]:
        if x in shared:
            return (shared[x],)
        ids, text = [], ours.get(x, b"").removeprefix(SPECIAL)
        while text:
            sizes = range(min(longest, len(text)), 0, -1)
            size = next((n for n in sizes if text[:n] in theirs), 0)
            ids += [theirs[text[:size]]] if size else []
            text = text[max(1, size) :]
        return tuple(ids)

    return shared, spell


SPECIAL = b"\0special "  # before the name of a token that no plain text has


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Of every id the bytes it stands for. Vocabularies write them in two ways: one character for
    each byte (GPT-2), or text with a mark for the space and <0x0A> for a byte (SentencePiece).
    """
    decoder = str(json.loads(tokenizer.inner.to_str()).get("decoder"))
    read = partial(_from_alphabet, _byte_alphabet()) if "ByteLevel" in decoder else _from_pieces
    added = tokenizer.inner.get_added_tokens_decoder()
    found = {}
    for token, i in sorted(tokenizer.inner.get_vocab().items(), key=lambda item: item[1]):
        mark = SPECIAL if i in added and added[i].special else b""
        found[i] = mark + (token.encode() if i in added else read(token))
    return found


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character of each byte: itself where it can be seen, else one from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in seen]
    return {chr(b): b for b in seen} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _from_alphabet(alphabet: dict[str, int], token: str) -> bytes:
    return bytes(alphabet[c] for c in token) if set(token) <= set(alphabet) else token.encode()


def _from_pieces(token: str) -> bytes:
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


# ---------------------------------------------------------------- KV cache


class Cache:
    """What a model remembers of the tokens seen so far: arrays of some capacity, and a length.

    k, v     keys [L, G, C, capacity] and values [L, G, capacity, C] of every layer
    states   [capacity, D]: what the head makes its logits from; a drafter may read them
    known    how many states, from the first, were given from outside: a pass leaves those alone

    Entries at or past `length` are dead: never read, overwritten by the next call. That is why
    rollback costs nothing but a smaller number.
    """

    def __init__(self, config: Config, capacity: int, backend: Backend):
        L, G, C = config.layers, config.kv_heads, config.head_dim
        zeros = partial(backend.xp.zeros, dtype=backend.dtype, device=backend.device)
        self.k, self.v = zeros((L, G, C, capacity)), zeros((L, G, capacity, C))
        self.states = zeros((capacity, config.width))
        self.capacity = capacity
        self.length = self.known = 0

    def truncate(self, length: int):
        """Forget everything after the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} tokens to {length}")
        self.length = length


# ---------------------------------------------------------------- the layers


# Those with xp in front are elementwise, for Backend.fuse.


def rms_norm(x, weight, eps, backend):  # [..., D] -> [..., D]
    squares = backend.xp.vecdot(x, x)[..., None]
    return backend.fuse(scaled, backend.xp, x, squares, x.shape[-1], eps, weight)


def layer_norm(x, weight, bias, eps, backend):  # [T, D] -> [T, D]
    x = x - backend.xp.mean(x, axis=-1, keepdims=True)
    return rms_norm(x, weight, eps, backend) + bias


def scaled(xp, x, squares, width, eps, weight):
    return x * (squares / width + eps) ** -0.5 * weight


def silu_gated(xp, gate, up):
    # gate * sigmoid(gate) * up; through tanh, because exp(-gate) overflows for large negative ones.
    return gate * (0.5 * xp.tanh(0.5 * gate) + 0.5) * up


def gelu(xp, x):
    # The tanh approximation that GPT-2 was trained with ("gelu_new").
    return 0.5 * x * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))


def rotate(x, cos, sin, backend):  # [H, T, C], [T, C], [T, C] -> [H, T, C]
    # Half-split layout: channel i turns together with channel i + C/2. `sin` has the minus sign of
    # the first half in it.
    half = x.shape[-1] // 2
    swapped = backend.xp.concat([x[..., half:], x[..., :half]], axis=-1)
    return backend.fuse(turned, backend.xp, x, swapped, cos, sin)


def turned(xp, x, swapped, cos, sin):
    return x * cos + swapped * sin


def rope_tables(positions, inv_freq, xp):  # [T], [C/2] -> two of [T, C]
    angles = positions[:, None] * inv_freq
    cos, sin = xp.cos(angles), xp.sin(angles)
    return xp.concat([cos, cos], axis=-1), xp.concat([-sin, sin], axis=-1)


def project(x, w, name, linear):  # [T, in] -> [T, out]
    y = linear(x, w[name])
    return y + w[name + "_bias"] if name + "_bias" in w else y


def split_heads(x, heads, xp):  # [T, heads C] -> [heads, T, C]
    return xp.permute_dims(xp.reshape(x, (x.shape[0], heads, -1)), (1, 0, 2))


def join_heads(x, xp):  # [heads, T, C] -> [T, heads C]
    return xp.reshape(xp.permute_dims(x, (1, 0, 2)), (x.shape[1], -1))


def attention(q, k, v, cache, l, mask, backend):  # [H, T, C], [G, T, C] twice -> [H, T, C]
    """Store the new keys and values, then attend to all S of them under the mask [H/G T, S]."""
    xp, (H, T, C), G, S = backend.xp, q.shape, k.shape[0], mask.shape[1]
    cache.k[l, :, :, S - T : S] = xp.permute_dims(k, (0, 2, 1))
    cache.v[l, :, S - T : S, :] = v
    # The H/G heads that share a key head are further rows of one product.
    q = xp.reshape(q, (G, H // G * T, C)) * C**-0.5
    scores = xp.matmul(q, cache.k[l, :, :, :S]) + mask  # [G, H/G T, S]
    scores = backend.fuse(exp_below, xp, scores, xp.max(scores, axis=-1, keepdims=True))
    out = xp.matmul(scores, cache.v[l, :, :S, :]) / xp.sum(scores, axis=-1, keepdims=True)
    return xp.reshape(out, (H, T, C))


def exp_below(xp, x, highest):
    return xp.exp(x - highest)


def causal_mask(T, S, copies, backend):  # -> [copies T, S]
    # Row i is the token at position S - T + i: it sees the keys 0..S-T+i. One formula serves
    # prefill (T = S), decoding (T = 1) and verification (T = K + 1).
    xp, device = backend.xp, backend.device
    keys, positions = xp.arange(S, device=device), xp.arange(S - T, S, device=device)
    zero = xp.zeros((), dtype=backend.dtype, device=device)
    mask = xp.where(keys[None, :] <= positions[:, None], zero, -math.inf)
    return xp.tile(mask, (copies, 1))


def llama_block(x, w, c, cache, l, rope, mask, backend):  # [T, D] -> [T, D]
    """Llama, Mistral, Qwen2, Qwen3. Pre-norm attention, then a gated MLP."""
    xp, linear, H, G = backend.xp, backend.linear, c.heads, c.kv_heads
    heads = project(rms_norm(x, w["attn_norm"], c.eps, backend), w, "qkv", linear)
    heads = split_heads(heads, H + 2 * G, xp)
    qk, v = heads[: H + G, :, :], heads[H + G :, :, :]
    if "q_norm" in w:
        q = rms_norm(qk[:H, :, :], w["q_norm"], c.eps, backend)
        k = rms_norm(qk[H:, :, :], w["k_norm"], c.eps, backend)
        qk = xp.concat([q, k], axis=0)
    qk = rotate(qk, *rope, backend)
    out = attention(qk[:H, :, :], qk[H:, :, :], v, cache, l, mask, backend)
    x = x + project(join_heads(out, xp), w, "o", linear)
    gate_up = project(rms_norm(x, w["mlp_norm"], c.eps, backend), w, "gate_up", linear)
    gate, up = gate_up[:, : c.hidden], gate_up[:, c.hidden :]
    return x + project(backend.fuse(silu_gated, xp, gate, up), w, "down", linear)


def gpt2_block(x, w, c, cache, l, rope, mask, backend):  # [T, D] -> [T, D]
    """GPT-2. Pre-norm attention, then a plain MLP; positions were added to the embedding."""
    xp, linear, H = backend.xp, backend.linear, c.heads
    normed = layer_norm(x, w["attn_norm"], w["attn_norm_bias"], c.eps, backend)
    heads = split_heads(project(normed, w, "qkv", linear), 3 * H, xp)
    q, k, v = heads[:H, :, :], heads[H : 2 * H, :, :], heads[2 * H :, :, :]
    out = attention(q, k, v, cache, l, mask, backend)
    x = x + project(join_heads(out, xp), w, "o", linear)
    normed = layer_norm(x, w["mlp_norm"], w["mlp_norm_bias"], c.eps, backend)
    up = project(normed, w, "up", linear)
    return x + project(backend.fuse(gelu, xp, up), w, "down", linear)


def draft_config(raw: dict) -> Config:
    """config.json of a draft for one target -> Config. `head_size` is the N of its weights."""
    config = llama_config({**raw, "tie_word_embeddings": False})
    return dataclasses.replace(config, head_rows=_read(raw, "head_size", "count"))


class Family(NamedTuple):
    """A kind of model: how to read its config.json, names of its weights, what a layer does."""

    config: Callable[[dict], Config]
    weights: tuple
    block: Callable


DRAFT = Family(draft_config, DRAFT_WEIGHTS, llama_block)
FAMILIES = {
    "gpt2": Family(gpt2_config, GPT2_WEIGHTS, gpt2_block),
    "llama": Family(llama_config, LLAMA_WEIGHTS, llama_block),
    "mistral": Family(mistral_config, LLAMA_WEIGHTS, llama_block),
    "qwen2": Family(qwen2_config, LLAMA_WEIGHTS, llama_block),
    "qwen3": Family(qwen3_config, LLAMA_WEIGHTS, llama_block),
}


# ---------------------------------------------------------------- one pass


class Model:
    """A checkpoint on a backend. Call it with all tokens; it feeds those the cache has not seen."""

    LONGEST_PASS = 512  # rows; a longer prompt goes through in pieces, to bound the [T, S] scores

    def __init__(self, config: Config, weights: dict, backend: Backend, block: Callable):
        self.config, self.weights, self.backend, self.block = config, weights, backend, block
        self.vocab, self.context = config.vocab, config.context
        self.inv_freq = backend.to_device(np.asarray(config.inv_freq))

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for up to `capacity` tokens."""
        return Cache(self.config, capacity, self.backend)

    def borrow_cache(self, cache: Cache) -> Cache:
        """A cache in the arrays of another one, of a model that begins with the same layers; its
        length and its states are its own."""
        own = self.new_cache(0)
        own.k, own.v, own.capacity = cache.k, cache.v, cache.capacity
        own.states = self.backend.xp.zeros_like(cache.states)
        return own

    def __call__(self, tokens: Sequence[int], cache: Cache, rows: int) -> np.ndarray:
        """Logits of the last `rows` tokens, [rows, V], on the host.

        Feeds tokens[cache.length:]; prefill, decoding, verification and a draft's catching up are
        all this call. Row i is the law of the token after tokens[: len(tokens) - rows + i + 1].

        Raises ValueError when there is nothing to feed, when more rows are asked for than are fed,
        or when the tokens exceed the cache's capacity or the context.
        """
        new, limit = tokens[cache.length :], min(cache.capacity, self.context)
        if not 1 <= rows <= len(new):
            raise ValueError(f"{rows} rows of logits from {len(new)} tokens new to the cache")
        if len(tokens) > limit:
            raise ValueError(f"{len(tokens)} tokens do not fit: cache and context hold {limit}")
        with self.backend.during_pass(len(new)):
            for piece in self._pieces(new, rows):
                x = self.feed(piece, cache)
            return self.backend.to_numpy(self.head(x[x.shape[0] - rows :, :]))

    def _pieces(self, new: Sequence[int], rows: int) -> Iterator[Sequence[int]]:
        # The last piece must hold all the rows that are asked for.
        last = max(rows, (len(new) - 1) % self.LONGEST_PASS + 1)
        for a in range(0, len(new) - last, self.LONGEST_PASS):
            yield new[a : min(a + self.LONGEST_PASS, len(new) - last)]
        yield new[len(new) - last :]

    def feed(self, new: Sequence[int], cache: Cache):  # T ids -> [T, D]
        """Put T tokens through all layers; their states after the final norm, also in the cache."""
        w, eps = self.weights, self.config.eps
        x = self.layers(self.embed(new, cache), cache)
        if "norm_bias" in w:
            x = layer_norm(x, w["norm"], w["norm_bias"], eps, self.backend)
        else:
            x = rms_norm(x, w["norm"], eps, self.backend)
        first = max(cache.known, cache.length - len(new))
        cache.states[first : cache.length, :] = x[len(new) - (cache.length - first) :, :]
        return x

    def embed(self, new: Sequence[int], cache: Cache):  # T ids -> [T, D]
        ids = self.backend.to_device(np.asarray(new, np.int64))  # the one transfer of a pass
        x, S = self.backend.rows(self.weights["embed"], ids), cache.length + len(new)
        if "positions" in self.weights:
            ids = self.backend.xp.arange(cache.length, S, device=self.backend.device)
            x = x + self.backend.rows(self.weights["positions"], ids)
        return x

    def layers(self, x, cache: Cache):  # [T, D] -> [T, D]
        xp, device, c = self.backend.xp, self.backend.device, self.config
        T, S = x.shape[0], cache.length + x.shape[0]
        positions = xp.arange(S - T, S, dtype=self.backend.dtype, device=device)
        rope = rope_tables(positions, self.inv_freq, xp)
        mask = causal_mask(T, S, c.heads // c.kv_heads, self.backend)
        for l, layer in enumerate(self.weights["layers"]):
            x = self.block(x, layer, c, cache, l, rope, mask, self.backend)
        cache.length = S
        return x

    def head(self, x):  # [rows, D] -> [rows, V]
        tied = "head" in self.config.absent
        return self.backend.linear(x, self.weights["embed" if tied else "head"])


class StateDraftModel(Model):
    """A draft that reads, beside each token, the target's state one token back.

    (Li et al. 2024, "EAGLE", arXiv 2401.15077.) What it puts out stands in for the target's state
    at that token until the target has computed it: the cache's `states` hold the true ones as far
    as its drafter has put them there, then the guesses. The head knows only some tokens; the others
    get -inf, which is q = 0. (Zhao et al. 2025, "FR-Spec", arXiv 2502.14856.)
    """

    def __init__(self, config: Config, weights: dict, target: Model):
        super().__init__(
            config, weights | {"embed": target.weights["embed"]}, target.backend, llama_block
        )
        self.know(target.backend.to_numpy(weights["head_ids"]).astype(np.int64))

    def know(self, ids: np.ndarray):
        """The head's row i is the logit of token ids[i]; no other token has one."""
        if not 0 <= ids.min() <= ids.max() < self.vocab:
            raise ValueError("the draft's head names ids outside the target's vocabulary")
        rows = np.full(self.vocab, len(ids))  # one past the last: -inf
        rows[ids] = np.arange(len(ids))
        self.head_ids, self.head_rows = ids, self.backend.to_device(rows)

    def embed(self, new, cache):  # T ids -> [T, D]
        xp, w, (a, T) = self.backend.xp, self.weights, (cache.length, len(new))
        x = rms_norm(super().embed(new, cache), w["embed_norm"], self.config.eps, self.backend)
        back = cache.states[max(0, a - 1) : a + T - 1, :]
        if a == 0:  # nothing came before the first token
            back = xp.concat([xp.zeros_like(x[:1, :]), back], axis=0)
        back = rms_norm(back, w["state_norm"], self.config.eps, self.backend)
        return self.backend.linear(xp.concat([x, back], axis=-1), w["join"])

    def head(self, x):  # [rows, D] -> [rows, V]
        xp = self.backend.xp
        known = self.backend.linear(x, self.weights["head"])
        other = xp.full((x.shape[0], 1), -math.inf, dtype=x.dtype, device=self.backend.device)
        return xp.take(xp.concat([known, other], axis=-1), self.head_rows, axis=-1)
