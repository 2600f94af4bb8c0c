"""Contract: `bench.py --lossless` accepts what samples from the target and nothing else.

Its p-value is right for texts whose tokens depend on each other, where a chi-square test is not; a
law that differs is found; a greedy answer may part from plain decoding's only at a near-tie; a way
that does not pass ends the command with status 1.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import bench
import minispec
import model

FOLDER = Path(__file__).parent / "data" / "oracles" / "llama_tied"


def repetitive(rng, texts, share=0.5):
    """Texts of one token each, eight times over: 0 with probability `share`, else 1."""
    return [[int(rng.random() >= share)] * 8 for _ in range(texts)]


def test_p_is_uniform_for_dependent_tokens_of_one_law():
    """Taken as eight independent tokens a text, they would be rejected in most of the runs."""
    rng, ps, naive = np.random.default_rng(1), [], 0
    for seed in range(200):
        ours, plain = ([repetitive(rng, 12) for _ in range(3)] for _ in range(2))
        ps.append(bench.permutation_p(ours, plain, 199, seed))
        counts = np.array([[np.sum(t) for t in (a, b)] for a, b in zip(ours, plain)])
        z = (counts[:, 0] - counts[:, 1]) / np.sqrt(2 * 96 / 4)
        naive += np.sum(z**2) > 7.815  # chi-square, three degrees of freedom, 5 %
    for level in 0.05, 0.25, 0.5:
        assert np.mean(np.array(ps) <= level) <= level + 3 * math.sqrt(level * (1 - level) / 200)
    assert np.mean(np.array(ps) <= 0.5) >= 0.35 and naive > 60


def test_p_finds_another_law_and_stays_within_the_prompt():
    rng = np.random.default_rng(2)
    plain = [repetitive(rng, 20) for _ in range(5)]
    ours = [repetitive(rng, 20, 0.9) for _ in range(5)]
    assert bench.permutation_p(ours, plain) <= 0.001
    # Prompts differ from each other, and each is the same on both sides.
    apart = [[[i] * 8] * 20 for i in range(5)]
    assert bench.permutation_p(apart, apart, 99) == 1.0
    # Samples of different sizes are compared by their shares.
    assert bench.permutation_p([[[0, 1]] * 2], [[[0, 1]] * 9], 99) == 1.0


def test_holms_correction():
    assert bench.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert bench.holm([0.6, 0.9]) == [1.0, 1.0] and bench.holm([]) == []


def test_where_greedy_answers_part():
    logits = {(1,): [0.0, 2.0, 1.99995], (1, 1): [3.0, 1.0, 0.0]}

    class Target:
        def new_cache(self, capacity):
            return capacity

        def __call__(self, tokens, cache, rows):
            assert rows == 1 and cache >= len(tokens)
            return np.array([logits[tuple(tokens)]])

    assert bench.first_gap(Target(), [1], [1, 0], [1, 0]) is None
    assert bench.first_gap(Target(), [1], [2, 0], [1, 0]) == pytest.approx(5e-5)
    assert bench.first_gap(Target(), [1], [1, 1], [1, 0]) == pytest.approx(2.0)
    assert bench.first_gap(Target(), [1], [1], [1, 0]) == math.inf


class StubTokenizer:
    def chat(self, text):
        return [1, 2, 3, 1, 2, len(text) % 7]


@pytest.fixture
def tiny(monkeypatch):
    target = model.load(FOLDER, model.numpy_backend("float64"))
    monkeypatch.setattr(bench, "SAMPLED", 6)
    monkeypatch.setattr(minispec, "load_pair", lambda *a, **k: (target, StubTokenizer(), None))


def table(capsys, tmp_path, *options):
    status = bench.main(["--lossless", *options, "--json", str(tmp_path / "l.json")])
    return status, json.loads((tmp_path / "l.json").read_text()), capsys.readouterr().out


def test_each_rule_on_a_tiny_target(tiny, tmp_path, capsys):
    status, found, out = table(capsys, tmp_path, "--quick", "--draft", "early:1")
    rows = found["lossless"]
    assert [r["method"] for r in rows[:3]] == [f"{rule}, early:1" for rule in minispec.RULES]
    assert status == 0 and "Every way samples from the target" in out
    assert all(r["tokens"] == 2 * 10 * 6 and r["greedy_wrong"] == 0 for r in rows)
    assert all(r["holm"] >= r["p"] > 0.01 for r in rows[:3]) and "holm" not in rows[3]
    assert max(map(len, out.splitlines())) <= 100


def first_proposal_unverified(proposals, p, q, randomness):
    n, last = minispec.token_rule(proposals, p, q, randomness)
    return (1, last) if proposals and n == 0 else (n, last)


def test_a_wrong_rule_ends_with_status_1(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(minispec.RULES, "block", first_proposal_unverified)
    status, found, out = table(capsys, tmp_path, "--quick", "--draft", "early:1")
    assert status == 1 and "Not the target's distribution: block, early:1" in out
    assert found["lossless"][1]["greedy_wrong"] > 0 == found["lossless"][0]["greedy_wrong"]


def test_the_test_itself_must_notice_its_control(capsys):
    row = dict(method="way", tokens=1, tokens_per_round=1.0, p=0.4, seconds=1.0,
               greedy_equal=10, greedy_wrong=0, near_ties=0)  # fmt: skip
    args = bench.argparse.Namespace(json=None, quick=False)
    rows = [dict(row), dict(row), dict(row, method="control")]
    assert bench.judge(args, rows) == 1 and "did not notice the control" in capsys.readouterr().out
    rows[-1]["p"] = 0.001
    assert bench.judge(args, rows) == 0
    assert bench.judge(args, [dict(row, p=0.009), *rows[1:]]) == 1


def test_other_options_are_refused(capsys):
    assert bench.main(["--lossless", "--temperature", "1"]) == 2
    assert "--lossless has no use for --temperature" in capsys.readouterr().err
