"""Contract: bench.py reports what it measured, and predicts from nothing that it measured.

A replay of known continuations goes through the very rounds of the real target; a ratio is printed
only where both sides emitted equally many tokens; every clock stops on a synchronised device.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import bench
import minispec
import model

FOLDER = Path(__file__).parent / "data" / "oracles" / "llama_tied"
PROMPT = [1, 2, 3, 1, 2]


@pytest.fixture
def target():
    return model.load(FOLDER, model.numpy_backend("float64"))


def answered(accepted, proposed, tokens=None):
    """A round in which `accepted` of `proposed` proposals were accepted."""
    ids = [0] * (accepted + 1) if tokens is None else tokens
    return minispec.Round(ids, accepted, [0] * proposed, [], [], (0, 0), None)


@pytest.mark.parametrize("K", [0, 1, 3, 8])
def test_a_replay_goes_through_the_rounds_of_the_target(target, K):
    N = target.context - len(PROMPT)
    plain = list(minispec.autoregressive(target, PROMPT, max_new_tokens=N))

    def rounds(model):
        return list(minispec.generate(model, PROMPT, minispec.PromptLookup(), K, max_new_tokens=N))

    known = bench.known_continuation(target, PROMPT, (), N, [1])
    assert known.more == plain and known.states.shape == (len(PROMPT) + N, target.config.width)
    real, replayed = rounds(target), rounds(bench.Replay(known, target))
    facts = [(r.tokens, r.accepted, r.proposals, r.ended) for r in real]
    assert [(r.tokens, r.accepted, r.proposals, r.ended) for r in replayed] == facts
    assert K == 0 or any(r.accepted for r in real), "nothing accepted: this shows too little"


def test_tally_leaves_out_first_rounds_and_counts_by_position():
    generations = [
        [answered(2, 2), answered(1, 2), answered(2, 2)],
        [answered(0, 2), answered(0, 1)],
    ]
    tally = bench.Tally.of(generations, K=3)
    assert (tally.tokens, tally.rounds, tally.rows) == (6, 3, [3, 3, 2])
    assert tally.acceptance == [2 / 3, 1 / 2, 0.0]  # of 3, 2 and no rounds that reached so far
    assert tally.tokens_per_round == 2


def generation(seconds, *rounds):
    return minispec.Answer(rounds=list(rounds), seconds=seconds, first_round=1.0)


def test_a_speedup_compares_rates_after_the_first_round():
    plain = generation(5.0, *[answered(0, 0)] * 5)  # 4 tokens in 4 s
    fast = generation(3.0, answered(0, 0), answered(1, 1), answered(1, 1))  # 4 tokens in 2 s
    assert bench.speedup_of({"plain": [plain], ("x", 4): fast}, ("x", 4)) == 2.0


def test_no_speedup_where_the_outputs_differ_in_length():
    plain, longer = generation(3.0, *[answered(0, 0)] * 3), generation(4.0, *[answered(0, 0)] * 4)
    results = {"plain": [plain], ("d", 1): longer}
    assert bench.speedup_of(results, ("d", 1)) is None
    prediction = {("d", 1): bench.Prediction(1.0, 0.0, 0.0)}
    table = bench.configuration("x", "default", "d", [results], [1], prediction, {1: 1.0, 2: 1.5})
    assert table["by_k"][0]["cost"] is None
    assert table["speedup"] is None and table["by_k"][0]["measured"] is None
    assert "differ in length" in table["verdict"]


def test_passes_are_timed_on_a_synchronised_device_after_a_warm_up(target):
    """Every timed pass lies between two synchronisations, and each kind has one untimed before."""
    events = []

    class Watched(model.Model):
        def __call__(self, tokens, cache, rows):
            events.append(rows)
            return super().__call__(tokens, cache, rows)

    backend = dataclasses.replace(target.backend, synchronize=lambda: events.append("sync"))
    watched = Watched(target.config, target.weights, backend, target.block)
    (times,) = bench.pass_seconds([watched], most_rows=2, context=8, repeats=3)
    assert set(times) == {1, 2} and min(times.values()) > 0
    assert events[1:] == ["sync", 1, "sync", "sync", 2, "sync"] * 4


def test_several_targets_are_timed_in_turn(target):
    order = []

    class Watched(model.Model):
        def __call__(self, tokens, cache, rows):
            order.append((self.name, rows))
            return super().__call__(tokens, cache, rows)

    pair = [Watched(target.config, target.weights, target.backend, target.block) for _ in "ab"]
    pair[0].name, pair[1].name = "a", "b"
    times = bench.pass_seconds(pair, most_rows=2, context=8, repeats=2)
    assert [set(t) for t in times] == [{1, 2}, {1, 2}]
    assert order[2:] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)] * 3


def test_verification_measures_both_ways(monkeypatch, tmp_path, capsys):
    made = []

    def tiny_layers(backend):
        made.append(backend.name)
        return model.load(FOLDER, backend)

    monkeypatch.setattr(bench, "synthetic", tiny_layers)
    file = tmp_path / "v.json"
    assert bench.main(["--verification", "--target", str(FOLDER), "--json", str(file)]) == 0
    assert made == ["numpy, plain", "numpy, tiles"]
    report, out = json.loads(file.read_text()), capsys.readouterr().out
    assert out.count("\n17 ") == 2 and max(map(len, out.splitlines())) <= 100
    for part in list(report.values())[2:]:
        passes = [part["pass_ms"][way] for way in ("plain", "tiles")]
        assert all(list(p) == [str(T) for T in range(1, 18)] for p in passes)
        assert part["one_row_ms"] == min(p["1"] for p in passes)


def test_the_synthetic_layers_are_a_model():
    m = bench.synthetic(model.numpy_backend(way="tiles"), layers=1)
    logits = m([1, 2, 3], m.new_cache(3), rows=3)
    assert logits.shape == (3, 4096) and np.isfinite(logits).all() and logits.std() > 0


def test_prediction_is_the_cost_model(target, monkeypatch):
    """Where the host costs nothing: tokens a round over the mean of v at the rounds' rows."""
    plain = list(minispec.autoregressive(target, PROMPT, max_new_tokens=10))
    rounds = list(minispec.generate(target, PROMPT, minispec.PromptLookup(), 2, max_new_tokens=10))
    tally = bench.Tally.of([rounds], 2)
    one_pass = {1: 10.0, 2: 12.0, 3: 13.0}  # seconds: the host's microseconds vanish beside them
    known = bench.known_continuation(target, PROMPT, (), 10, [1])
    assert known.more == plain
    got = bench.predict(target, [known], minispec.PromptLookup(), 2, one_pass)
    mean = np.mean([one_pass[T] for T in tally.rows])
    assert got.speedup == pytest.approx(tally.tokens_per_round * 10 / mean, rel=1e-2)
    assert 0 <= got.c < 1e-3 and 0 < got.overhead < 1e-2


class StubTokenizer:
    stop = frozenset()

    def chat(self, text, system=None):
        return [1, 2, 3, 1, 2, len(text) % 7]

    def decode(self, ids, special=False):
        return "".join(chr(97 + x % 26) for x in ids)


@pytest.fixture
def tiny(monkeypatch, target):

    def load_pair(target_name, draft_name):
        draft = minispec.load_drafter(draft_name or "ngram", target, None)
        return target, StubTokenizer(), draft

    monkeypatch.setattr(minispec, "load_pair", load_pair)
    monkeypatch.setattr(
        bench, "pass_seconds", lambda targets, rows: [{T: 1.0 * T for T in range(1, 10)}]
    )


def test_the_whole_of_it_on_a_tiny_target(tiny, tmp_path, capsys):
    line = ["--quick", "--target", "some/where", "--json", str(tmp_path / "b.json")]
    assert bench.main(line) == 0
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "b.json").read_text())
    assert json.loads(out.splitlines()[-1]) == report
    tables = out[out.index("v(T)") :].splitlines()[:-1]
    assert max(map(len, tables)) <= 100
    assert report["verification"]["auto"]["2"] == 2.0
    for table in report["configurations"]:
        Ks = [2, 4] if table["name"] == "chat and code" else [2, 8]
        assert [row["K"] for row in table["by_k"]] == Ks
        assert all(len(row["acceptance"]) == row["K"] for row in table["by_k"])
        assert table["target"] == "some/where" and table["draft"] == "ngram"
        assert table["speedup"] == max(row["measured"] for row in table["by_k"])
        assert str(table["best_k"]) in table["verdict"]


def test_above_temperature_0_nothing_is_predicted_and_the_lengths_agree(tiny, tmp_path, capsys):
    line = ["--quick", "--temperature", "1", "--json", str(tmp_path / "b.json")]
    assert bench.main(line) == 0
    for table in json.loads((tmp_path / "b.json").read_text())["configurations"]:
        assert all(row["predicted"] is None and row["measured"] for row in table["by_k"])
    out = capsys.readouterr().out
    assert max(map(len, out[out.index("v(T)") :].splitlines()[:-1])) <= 100


def options_of(*line):
    namespace = dict(draft=None, full=False, quick=False)
    return argparse.Namespace(**namespace | {name: True for name in line})


def test_what_is_measured_by_default():
    chain = minispec.Drafter()
    chain.name = minispec.TRAINED
    plan = bench.plan_of(options_of(), chain)
    assert plan["chat and code"][0] == ("weights/draft", minispec.TRAINED, "ngram")
    assert plan["copy-heavy"][0] == ("ngram", minispec.TRAINED)
    full = bench.plan_of(options_of("full"), minispec.PromptLookup())
    assert {names for names, _ in full.values()} == {("ngram",)}
    assert all(list(Ks) == list(range(1, 9)) for _, Ks in full.values())


@pytest.mark.parametrize(
    "options, words",
    [
        (["--json", "/nowhere/b.json"], "cannot write"),
        (["--temperature", "-1"], "temperature"),
        (["--draft", "no-such-draft"], "no-such-draft"),
        (["--prompts", "/nowhere/p.json"], "p.json"),
        (["--prompts", str(FOLDER / "config.json")], "measured"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tiny, capsys, options, words):
    try:
        status = bench.main(options)
    except SystemExit as end:  # argparse's own way out
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "damage", [[], {"chat": []}, {"chat": "one"}, {"chat": [1]}, {"chat": [" "]}]
)
def test_a_prompts_file_of_the_wrong_kind_is_refused(tmp_path, damage):
    whole = {kind: ["a text"] for kind in ("chat", "code", "copy")}
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"measured": whole, "calibration": whole, "more": 1}))
    assert bench.read_prompts(file) == {"measured": whole, "calibration": whole}
    broken = damage if isinstance(damage, list) else whole | damage
    file.write_text(json.dumps({"measured": whole, "calibration": broken}))
    with pytest.raises(ValueError, match="calibration, chat"):
        bench.read_prompts(file)


def test_committed_prompts_are_read_and_enough():
    prompts = bench.read_prompts(bench.PROMPTS)
    assert all(len(texts) >= 4 for texts in prompts["measured"].values())
    measured = {t for texts in prompts["measured"].values() for t in texts}
    assert not measured & {t for texts in prompts["calibration"].values() for t in texts}


def test_rounded():
    assert bench.rounded({"a": [1.23456, 7, None, "x"]}) == {"a": [1.235, 7, None, "x"]}


def test_rows_are_medians_over_prompts():
    def prompt(seconds):  # K=1: two tokens a round; `seconds` for 3 rounds, plain 6 s for 6 tokens
        plain = generation(7.0, *[answered(0, 0)] * 7)
        return {
            "plain": [plain],
            ("d", 1): generation(1.0 + seconds, answered(0, 0), *[answered(1, 1)] * 3),
        }

    results = [prompt(3.0), prompt(2.0), prompt(6.0)]
    row = bench.at_K(results, "d", 1, bench.Prediction(1.5, 0.1, 0.2), v=1.25)
    assert (row["measured"], row["spread"]) == (2.0, [1.0, 3.0])
    assert (row["tokens_per_round"], row["cost"], row["rows_per_round"]) == (2, 1.0, 2)


def test_an_answer_too_short_to_time_is_refused():
    with pytest.raises(ValueError, match="too short"):
        bench.check_length([1] * 17, [1, 8])
    bench.check_length([1] * 18, [1, 8])
