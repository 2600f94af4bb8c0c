"""Contract: one forward pass for every backend, and nothing on the host but ids and logits.

Without a GPU this is shown on two stand-ins. array_api_strict has the functions of the Python array
API standard and no others; its device "no_float64" refuses float64, as Apple's GPUs do, and any
conversion to NumPy, as CuPy does. torch runs on the CPU. Each model call transfers ids up once and
logits down once.
"""

import dataclasses
import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import bench
import minispec
import model

FOLDER = Path(__file__).parent / "data" / "oracles"
MODELS = sorted(p.name for p in FOLDER.iterdir() if (p / "config.json").is_file())
PROMPT = [1, 2, 3, 1, 2]


def strict_backend(dtype="float32"):
    xp = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    host = xp.Device("CPU_DEVICE")
    return model.device_backend(
        "strict", xp, xp.Device("no_float64"), dtype, ("float32",),
        lambda x: np.asarray(x.to_device(host)), lambda: None,
    )  # fmt: skip


def torch_backend(dtype="float32"):
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("array_api_compat", reason="array-api-compat is not installed")
    return model.torch_backend(dtype, "cpu")


BACKENDS = {"strict": strict_backend, "torch": torch_backend}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]()


def greedy(target, draft=None, K=3):
    rounds = minispec.generate(target, PROMPT, draft, K, max_new_tokens=24)
    return [x for r in rounds for x in r.tokens]


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text_are_those_of_numpy(backend, name):
    ours = model.load(FOLDER / name, model.numpy_backend(way="plain"))
    theirs = model.load(FOLDER / name, backend)
    logits = [m(PROMPT, m.new_cache(8), rows=3) for m in (ours, theirs)]
    assert type(logits[1]) is np.ndarray and logits[1].dtype == np.float32
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-5)
    text = greedy(ours)
    assert greedy(theirs) == greedy(theirs, minispec.PromptLookup()) == text


def test_cached_equals_recomputed_after_a_rollback(backend):
    m = model.load(FOLDER / "llama_gqa", backend)
    cache = m.new_cache(16)
    m([*PROMPT, 7, 8, 9], cache, rows=4)
    cache.truncate(len(PROMPT))
    again = m([*PROMPT, 4, 5], cache, rows=2)
    whole = m([*PROMPT, 4, 5], m.new_cache(16), rows=2)
    np.testing.assert_allclose(again, whole, rtol=1e-4, atol=1e-5)


def state_draft(target):
    """A draft on the target's states, with random weights, as test_draft makes its own."""
    rng, D, V = np.random.default_rng(0), target.config.width, target.vocab
    c = dataclasses.replace(target.config, layers=1, head_rows=20)
    normal = lambda *shape: target.backend.to_device(0.3 * rng.standard_normal(shape))  # noqa: E731
    ones = target.backend.to_device(np.ones(D))
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layer = dict(attn_norm=ones, mlp_norm=ones, qkv=normal(q + 2 * kv, D), o=normal(D, q),
                 gate_up=normal(2 * c.hidden, D), down=normal(D, c.hidden))  # fmt: skip
    ids = target.backend.to_device(rng.permutation(V)[:20].astype(np.float64))
    weights = dict(layers=[layer], norm=ones, embed_norm=ones, state_norm=ones,
                   join=normal(D, 2 * D), head=normal(20, D), head_ids=ids)  # fmt: skip
    return minispec.StateDraft(model.StateDraftModel(c, weights, target))


@pytest.mark.parametrize("make", [
    state_draft,
    lambda target: minispec.EarlyExit(model.first_layers(target, 1)),
    lambda target: minispec.ModelDraft(target),
])  # fmt: skip
def test_every_kind_of_draft_on_the_same_backend(backend, make):
    target = model.load(FOLDER / "llama_tied", backend)
    drafter = make(target)
    assert greedy(target, drafter) == greedy(target)
    assert drafter.cached > len(PROMPT)


def test_one_transfer_up_and_one_down_for_each_call(backend):
    counts = {"up": 0, "down": 0}

    def counted(function, way):
        def call(array):
            counts[way] += 1
            return function(array)

        return call

    watched = dataclasses.replace(
        backend,
        to_device=counted(backend.to_device, "up"),
        to_numpy=counted(backend.to_numpy, "down"),
    )
    for name in "llama_tied", "gpt2":
        target = model.load(FOLDER / next(n for n in MODELS if n.startswith(name)), watched)
        drafter = minispec.ModelDraft(target)
        calls = minispec.Stopwatch(target), minispec.Stopwatch(target)
        drafter.model = calls[1]
        counts.update(up=0, down=0)
        greedy(calls[0], drafter)
        made = sum(c.calls for c in calls)
        assert made > 10 and counts == {"up": made, "down": made}


@pytest.mark.parametrize("dtype, error", [("float16", 0.02), ("bfloat16", 0.15)])
def test_smaller_weights_are_near(dtype, error):
    ours = model.load(FOLDER / "llama_gqa", model.numpy_backend(way="plain"))
    theirs = model.load(FOLDER / "llama_gqa", torch_backend(dtype))
    assert str(theirs.weights["layers"][0]["qkv"].dtype).endswith(dtype)
    assert str(theirs.weights["norm"].dtype).endswith("float32")
    a, b = (m(PROMPT, m.new_cache(8), rows=3) for m in (ours, theirs))
    assert 0 < np.max(np.abs(a - b)) < error * np.max(np.abs(a))


def launches(fuse):
    """Kernels that one decoding step of llama_gqa starts on torch; a fused function is one."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.utils._python_dispatch import TorchDispatchMode

    views = set("view permute transpose slice select expand unsqueeze _unsafe_view alias".split())
    views |= {"t", "detach", "lift_fresh"}

    class Count(TorchDispatchMode):
        started, inside = 0, False

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            name = operation.name().split("::")[1].split(".")[0]
            self.started += name not in views and not self.inside
            return operation(*args, **(kwargs or {}))

    count = Count()

    def as_one(f, xp, *arrays):
        count.started += 1
        count.inside = True
        y = f(xp, *arrays)
        count.inside = False
        return y

    backend = torch_backend()
    backend = dataclasses.replace(
        backend,
        during_pass=lambda rows: torch.no_grad(),
        fuse=as_one if fuse else backend.fuse,
    )
    target = model.load(FOLDER / "llama_gqa", backend)
    cache = target.new_cache(8)
    target(PROMPT, cache, rows=1)
    count.started = 0
    with count:
        target([*PROMPT, 4], cache, rows=1)
    return count.started, target.config.layers


def test_fusing_saves_a_third_of_the_kernel_launches():
    plain, layers = launches(fuse=False)
    fused, _ = launches(fuse=True)
    print(f"{layers} layers: {plain} launches, {fused} fused")  # README, Backends: pytest -s
    assert fused < 0.67 * plain


# --- choosing one -------------------------------------------------------------------------------


def test_what_is_not_there_is_said_with_the_command_that_mends_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "array_api_compat", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    for name, extra in ("torch", "mps"), ("cupy", "cuda"):
        monkeypatch.setitem(sys.modules, f"array_api_compat.{name}", None)
        with pytest.raises(ImportError, match=rf"pip install -e '\.\[{extra}\]'"):
            model.BACKENDS[name]("float32", None)
    assert model.BACKENDS["auto"]("float32", None).xp is np


@pytest.mark.parametrize(
    "options, words",
    [
        (("numpy", "float16", None), "float32 or float64, not float16"),
        (("numpy", "float32", "cuda"), "numpy backend is for cpu, not cuda"),
    ],
)
def test_numpy_refuses_other_types_and_devices(options, words):
    name, dtype, device = options
    with pytest.raises(ValueError, match=words):
        model.BACKENDS[name](dtype, device)


def test_torch_refuses_a_device_that_is_not_there():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"torch finds no device cuda here: choose one of .*cpu"):
        model.torch_backend("float32", "cuda")


def test_a_backend_refuses_types_that_it_has_not():
    pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    with pytest.raises(ValueError, match="strict backend has the types float32, not float16"):
        strict_backend("float16")


def test_the_command_line_names_backend_device_and_type(capsys):
    assert bench.main(["--backend", "numpy", "--dtype", "bfloat16", "--target", "x"]) == 2
    assert minispec.main(["--device", "mps", "--target", str(FOLDER / "llama_tied"), "hi"]) == 2
    assert "numpy backend is for cpu, not mps" in capsys.readouterr().err


def test_bandwidth_without_a_read_by_numpy():
    rates = bench.bandwidth(model.load(FOLDER / "llama_tied", torch_backend()), repeats=2)
    assert set(rates) == {"products", "bound", "bytes"} and rates["bound"] > 0


def test_the_stand_ins_are_installed_where_ci_says_so():
    """CI must not pass by skipping: it sets MINISPEC_BACKENDS to what it installed."""
    for name in os.environ.get("MINISPEC_BACKENDS", "").split():
        assert importlib.util.find_spec(name), f"{name} is not installed"
