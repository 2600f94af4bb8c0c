"""Contract: the configs of well-known checkpoints are read, and give the sizes they are known for.

The parameter counts below are those that the checkpoints' owners publish; ours follow from the
configs and the weight tables, so a wrong shape, a forgotten bias or an untied head shows. Then the
same configs, shrunk to one layer and a few channels, with random weights under the files' names:
they load, and speculative decoding with them equals plain decoding.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
from test_loading import save_tensors

import minispec
import model

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))
import checkpoints

PUBLISHED = {
    "distilbert/distilgpt2": 81_912_576,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
}


@pytest.mark.parametrize("name", checkpoints.CONFIGS)
def test_the_configs_give_the_published_number_of_parameters(name):
    assert checkpoints.numbers(checkpoints.CONFIGS[name]) == PUBLISHED[name]


def shrunk(raw):
    """The same structure: head counts, ties, biases, norms and rope; one layer, few channels."""
    gpt2 = raw["model_type"] == "gpt2"
    heads = raw["n_head" if gpt2 else "num_attention_heads"]
    if gpt2:
        return raw | dict(n_layer=1, n_embd=4 * heads, vocab_size=50, n_positions=64)
    return raw | dict(num_hidden_layers=1, hidden_size=4 * heads, intermediate_size=24,
                      vocab_size=50, head_dim=4)  # fmt: skip


@pytest.mark.parametrize("name", checkpoints.CONFIGS)
def test_a_small_checkpoint_of_the_same_structure_speculates(name, tmp_path):
    raw, rng = shrunk(checkpoints.CONFIGS[name]), np.random.default_rng(0)
    tensors = {
        key: (0.4 * rng.standard_normal(shape) + len(shape) % 2).astype("<f4")
        for key, shape in checkpoints.shapes(raw).items()
    }
    minispec.write_json(tmp_path / "config.json", raw)
    save_tensors(tmp_path / "model.safetensors", tensors)
    target = model.load(tmp_path, model.numpy_backend("float64"))
    plain = list(minispec.autoregressive(target, [1, 2, 3, 1, 2], max_new_tokens=30))
    rounds = minispec.generate(target, [1, 2, 3, 1, 2], minispec.PromptLookup(), max_new_tokens=30)
    assert [x for r in rounds for x in r.tokens] == plain


def test_pairs_share_a_family_and_the_draft_is_smaller():
    for draft, target in checkpoints.PAIRS:
        d, t = checkpoints.CONFIGS[draft], checkpoints.CONFIGS[target]
        assert d["model_type"] == t["model_type"]
        assert checkpoints.numbers(d, only_read=True) < checkpoints.numbers(t, only_read=True)


def test_the_table_of_the_readme_is_what_the_script_prints(capsys):
    checkpoints.main()
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out in readme
