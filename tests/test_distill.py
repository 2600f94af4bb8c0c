"""Contract: what distill.py trains is what model.py runs. Needs torch, and is skipped without.

The rollout of the training, all positions at once, equals the drafter's: one proposal after the
other, on the target's states as far as they are known and on the draft's own guesses from there.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from test_draft import CONFIG, D, small_target

import bench
import model

torch = pytest.importorskip("torch", reason="distill.py needs torch")
distill = pytest.importorskip("weights.distill")


class Stub:
    """The small target of test_draft as distill.Draft wants it."""

    def __init__(self, target):
        self.c, self.inv_freq = target.config, torch.tensor(target.config.inv_freq)
        w = target.weights
        self.layers = [
            {k: torch.from_numpy(v).float() for k, v in layer.items()} for layer in w["layers"]
        ]
        self.embed, self.norm = (torch.from_numpy(w[k]).float() for k in ("embed", "norm"))


@pytest.mark.parametrize("guesses", [0, 1, 2, 3])
def test_the_rollout_is_what_the_drafter_computes(guesses):
    target, ids = small_target(), np.arange(5, 300, 7)
    trained = distill.Draft(Stub(target), ids)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    w = {name: value.detach().double().numpy() for name, value in trained.named_parameters()}
    layer = {k: w[k] for k in ("attn_norm", "qkv", "o", "mlp_norm", "gate_up", "down")}
    rest = {k: w[k] for k in ("embed_norm", "state_norm", "join", "norm", "head")}
    config = model.draft_config(CONFIG | {"head_size": len(ids)})
    weights = rest | {"layers": [layer], "head_ids": ids}
    draft = model.StateDraftModel(config, weights, target)

    tokens = [7, 3, 11, 3, 250, 9, 8, 1, 40, 41]
    cache = target.new_cache(len(tokens))
    target(tokens, cache, rows=1)
    known = len(tokens) - 1 - guesses  # states that the drafter has; the rest it guesses
    own = draft.new_cache(len(tokens))
    own.states[:known], own.known = cache.states[:known], known
    for end in range(known + 1, len(tokens) + 1):
        logits = draft(tokens[:end], own, rows=1)[0]

    embedded = Stub(target).embed[torch.tensor([tokens])]
    states = torch.from_numpy(cache.states).float()[None]
    with torch.no_grad():
        outputs = trained.rollout(embedded, states, guesses + 1)
        z = outputs[guesses][0, -1] @ trained.head.T
    np.testing.assert_allclose(logits[ids], z.numpy(), rtol=1e-3, atol=1e-3)
    assert np.isneginf(np.delete(logits, ids)).all() and z.std() > 0.1 and D == 12


def test_temperature_0_draws_the_argmax_and_others_follow_the_law():
    rng, z = np.random.default_rng(0), torch.randn(2, 5)
    drawn = [distill.draw(z, torch.tensor([0.0, 0.7]), rng).tolist() for _ in range(4000)]
    assert {x for x, _ in drawn} == {int(z[0].argmax())}
    p = (z[1] / 0.7).softmax(-1).numpy()
    share = np.bincount([x for _, x in drawn], minlength=5) / len(drawn)
    assert np.abs(share - p).max() < 0.04  # five deviations


def test_no_prompt_of_the_bench_is_an_opener():
    prompts = json.loads(Path(bench.PROMPTS).read_text())
    asked = {t for part in ("measured", "calibration") for ts in prompts[part].values() for t in ts}
    rng = np.random.default_rng(0)
    assert not asked & {distill.opener(rng)[0] for _ in range(5000)}
