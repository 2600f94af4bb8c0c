"""Contract: bench.py reports what it measured, and predicts from nothing that it measured.

The cost model has the values of the papers; a rehearsal on a known continuation gives the very
rounds of the real target; a ratio is printed only where both sides emitted equally many tokens;
every clock stops on a synchronised device; a verdict names the cause that weighs most.
"""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


KINDS = [kind for kinds in bench.GROUPS.values() for kind in kinds]

# ---------------------------------------------------------------- the cost model


def test_expected_tokens_have_the_papers_values():
    """Leviathan et al. 2023, Eq. (1), and the study's K = 6 at 37.8 %."""
    assert bench.expected_tokens_iid(0.8, 5) == pytest.approx(3.69, abs=5e-3)
    assert bench.expected_tokens_iid(0.9, 10) == pytest.approx(6.86, abs=5e-3)
    assert bench.expected_tokens_iid(1.0, 4) == 5 and bench.expected_tokens_iid(0.3, 0) == 1
    tokens = bench.expected_tokens([0.378] * 6)
    assert tokens == pytest.approx(3.27, abs=5e-3)
    assert bench.speedup(tokens, 2.03) == pytest.approx(1.61, abs=5e-3)


@given(alpha=st.floats(0.0, 1.0), K=st.integers(1, 12))
def test_both_forms_of_expected_tokens_agree(alpha, K):
    cumulative = [alpha**i for i in range(1, K + 1)]
    assert bench.expected_tokens(cumulative) == pytest.approx(bench.expected_tokens_iid(alpha, K))
    if alpha < 0.99:
        closed = (1 - alpha ** (K + 1)) / (1 - alpha)
        assert bench.expected_tokens_iid(alpha, K) == pytest.approx(closed)


@given(
    c=st.floats(0.0, 2.0), K=st.integers(1, 8), v=st.floats(1.0, 9.0), overhead=st.floats(0.0, 0.3)
)
def test_at_break_even_nothing_is_gained(c, K, v, overhead):
    cost = bench.round_cost(K, c, {K + 1: v}, overhead)
    assert cost == K * c + v + overhead
    alpha = bench.break_even_alpha(K, c, {K + 1: v}, overhead)
    assert (alpha is None) == (cost > K + 1)
    if alpha is not None:
        gain = bench.speedup(bench.expected_tokens_iid(alpha, K), cost)
        assert gain == pytest.approx(1.0)
    even = bench.break_even_c(3.0, K, {K + 1: v}, overhead)
    assert bench.round_cost(K, even, {K + 1: v}, overhead) == pytest.approx(3.0)


def test_the_best_K_is_the_first_of_equals():
    assert bench.best_K({3: 1.5, 1: 1.2, 2: 1.5}) == 2


# ---------------------------------------------------------------- prediction


@pytest.mark.parametrize("K", [0, 1, 3, 8])
def test_a_replay_goes_through_the_rounds_of_the_target(target, K):
    N = target.context - len(PROMPT)
    plain = list(minispec.autoregressive(target, PROMPT, max_new_tokens=N))

    def rounds(model):
        return list(minispec.generate(model, PROMPT, minispec.PromptLookup(), K, max_new_tokens=N))

    known = bench.known_continuation(target, PROMPT, (), N)
    assert known.more == plain and known.states.shape == (len(PROMPT) + N, target.config.width)
    real, replayed = rounds(target), rounds(bench.Replay(known, target))
    facts = [(r.tokens, r.accepted, r.proposals, r.ended) for r in real]
    assert [(r.tokens, r.accepted, r.proposals, r.ended) for r in replayed] == facts
    assert K == 0 or any(r.accepted for r in real), "nothing accepted: this shows too little"


def state_draft(target):
    """A stand-in for a draft that reads states: right where the target's state is negative."""

    class Reader(minispec.Drafter):
        name = "reader"

        def start(self, vocab, capacity, seen=None):
            self.seen, self.vocab = seen, vocab

        def propose(self, tokens, K, law, randomness):
            if self.seen.length < len(tokens) - 1:
                return [], []
            x = int(1e3 * abs(float(self.seen.states[len(tokens) - 2, 0]))) % 2
            best = PLAIN[len(tokens) - len(PROMPT) :][:K]
            proposals = [y if (i + x) % 3 else 0 for i, y in enumerate(best)]
            return proposals, [minispec.point_mass(y, self.vocab) for y in proposals]

    PLAIN = list(minispec.autoregressive(target, PROMPT, max_new_tokens=30))
    return Reader()


DRAFTERS = {
    "lookup": lambda target: minispec.PromptLookup(),
    "itself": lambda target: minispec.ModelDraft(target),
    "int4": lambda target: minispec.load_drafter("int4", target, None),
    "early": lambda target: minispec.load_drafter("early:1", target, None),
    "states": state_draft,
    "chain": lambda target: minispec.Chain([minispec.PromptLookup(), state_draft(target)]),
}


@pytest.mark.parametrize("K", [1, 2, 5, 8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_rehearsal_gives_the_rounds_of_the_real_target(target, name, K):
    """Every round but the first, whose proposals a drafter makes before the first pass."""
    draft, N = DRAFTERS[name](target), 30
    known = bench.known_continuation(target, PROMPT, (), N)
    rehearsal = bench.rehearse(known, draft, target.vocab)
    assert len(rehearsal) == len(known.more) - 1
    rounds = list(minispec.generate(target, PROMPT, draft, K, max_new_tokens=N))
    done = len(rounds[0].tokens)
    real = [(len(r.proposals), r.accepted) for r in rounds[1:]]
    assert bench.rounds_at(K, rehearsal[done - 1 :]) == real
    assert any(n for _, n in real)  # else this shows too little


def test_a_rehearsal_of_a_shorter_text_is_its_beginning(target):
    known = bench.known_continuation(target, PROMPT, (), 30)
    whole = bench.rehearse(known, minispec.PromptLookup(), target.vocab)
    short = bench.rehearse(known._replace(more=known.more[:12]), minispec.PromptLookup(), 73)
    for K in (1, 3, 8):
        assert bench.rounds_at(K, whole[:11]) == bench.rounds_at(K, short)


def test_a_draft_that_is_narrower_or_shorter_is_rehearsed_like_any(target):
    """The one pass over the text is another way to the same counts."""
    known = bench.known_continuation(target, PROMPT, (), 30)

    class Narrow(model.Model):
        vocab = 40

        def __call__(self, tokens, cache, rows):
            assert max(tokens) < self.vocab
            return super().__call__(tokens, cache, rows)[:, : self.vocab]

    parts = target.config, target.weights, target.backend, target.block
    narrow, short = Narrow(*parts), model.Model(*parts)
    narrow.vocab, short.context = 40, 20
    for drafting in narrow, short:

        class Stepwise(minispec.ModelDraft):  # not of the very type: goes the general way
            pass

        one_pass = bench.rehearse(known, minispec.ModelDraft(drafting), target.vocab)
        stepwise = bench.rehearse(known, Stepwise(drafting), target.vocab)
        assert [right for _, right in one_pass] == [right for _, right in stepwise]
        assert drafting is narrow or stepwise[-1] == (0, 0)


def test_ctrl_c_while_predicting_ends_everything(target, monkeypatch):
    def stopped(*args, **kwargs):
        return minispec.Answer(ended="interrupted")

    monkeypatch.setattr(bench, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        bench.known_continuation(target, PROMPT, (), 30)
    monkeypatch.setattr(bench, "pass_seconds", lambda *args, **options: [{1: 0.010}])
    with pytest.raises(KeyboardInterrupt):
        bench.host_times(target, [bench.Known(PROMPT, [1] * 12, None)], minispec.PromptLookup())


def test_prediction_is_the_cost_model():
    """By hand. At K = 2: rounds of (2, 2), (2, 0), and (1, 1) at the end of the text."""
    rehearsal = [(8, 5), (8, 4), (8, 3), (8, 0), (8, 1), (1, 1)]
    assert bench.rounds_at(2, rehearsal) == [(2, 2), (2, 0), (1, 1)]
    hosts = bench.HostTimes(c={2: 0.1}, overhead={2: 0.05}, plain=0.02)
    v = {1: 1.0, 2: 1.1, 3: 1.3}
    got = bench.predict([rehearsal], 2, v, hosts)
    costs = [2 * 0.1 + 1.3 + 0.05] * 2 + [0.1 + 1.1 + 0.05]
    assert got.speedup == pytest.approx(6 / 3 * 1.02 / np.mean(costs))
    assert (got.tokens_per_round, got.acceptance) == (2.0, [2 / 3, 1 / 2])


def test_host_times_are_a_straight_line(target, monkeypatch):
    """A clock that only drafting moves: 3 ms a round and 2 ms a proposal, 10 ms a target pass."""
    known = bench.known_continuation(target, PROMPT, (), 30)
    clock = [0.0]
    monkeypatch.setattr(minispec.time, "perf_counter", lambda: clock[0])

    class Slow(minispec.PromptLookup):
        def propose(self, tokens, K, law, randomness):
            found = [0] * K
            clock[0] += 0.003 + 0.002 * K
            return found, [minispec.point_mass(0, 73)] * K

    monkeypatch.setattr(bench, "pass_seconds", lambda *args, **options: [{1: 0.010}])
    hosts = bench.host_times(target, [known], Slow())
    for K in (1, 2, 5, 8):
        # The cap at the text's end makes the last rounds of K = 6 shorter.
        assert hosts.c[K] == pytest.approx(0.2 + 0.3 / K, rel=0.05)
        assert hosts.overhead[K] == pytest.approx(0, abs=1e-9)
    assert hosts.plain == pytest.approx(0, abs=1e-9)


# ---------------------------------------------------------------- measurement


KEY = ("1", "float32")


def generation(seconds, *rounds, draft=0.0, verification=1.0):
    return minispec.Answer(
        rounds=list(rounds), seconds=seconds, first_round=1.0, first_verification=1.0, draft=draft,
        verification=verification,
    )  # fmt: skip


def test_a_speedup_compares_rates_after_the_first_round():
    plain = generation(5.0, *[answered(0, 0)] * 5)  # 4 tokens in 4 s
    fast = generation(3.0, answered(0, 0), answered(1, 1), answered(1, 1))  # 4 tokens in 2 s
    assert bench.gain({"plain": [plain], (KEY, 4): fast}, (KEY, 4)) == 2.0


def test_the_time_of_a_round_is_split_without_the_first():
    answer = generation(7.0, *[answered(1, 1)] * 3, draft=1.0, verification=5.0)
    # 6 s after the first round: 1 drafting, 4 in passes, 1 elsewhere; two rounds; steps of 0.5 s
    assert bench.split(answer, 0.5) == [1.0, 4.0, 1.0]


def test_acceptance_counts_by_position():
    rounds = [(2, 1), (2, 2), (1, 0)]
    assert bench.acceptance(rounds, K=3) == [2 / 3, 1 / 2, 0.0]  # of 3, 2 and no rounds so far


def setup(draft=None, Ks=(1,), way="float32", number="1", tokens=8):
    drafter = draft or minispec.PromptLookup()
    return bench.Setup(number, way, drafter, "chat and code", Ks, tokens, None)


def test_no_speedup_where_the_outputs_differ_in_length():
    plain, longer = generation(3.0, *[answered(0, 0)] * 3), generation(4.0, *[answered(0, 0)] * 4)
    results = [{"plain": [plain], (KEY, 1): longer}]
    table = bench.configuration(setup(), results, {"float32": {1: 1.0, 2: 1.5}})
    assert table["speedup"] is None and table["by_k"][0]["measured"] is None
    assert "differ in length" in table["verdict"]


def test_rows_are_medians_over_prompts():
    def prompt(seconds):  # K=1: two tokens a round; `seconds` for 3 rounds, plain 6 s for 6 tokens
        plain = generation(7.0, *[answered(0, 0)] * 7)
        rounds = answered(0, 0), *[answered(1, 1)] * 3
        return {"plain": [plain], (KEY, 1): generation(1.0 + seconds, *rounds)}

    results = [prompt(3.0), prompt(2.0), prompt(6.0)]
    prediction = bench.Prediction(1.5, 0.1, 0.2, 2.0, [1.0])
    row = bench.at_K(results, KEY, 1, prediction, {2: 1.25})
    assert (row["measured"], row["by_prompt"]) == (2.0, [2.0, 3.0, 1.0])
    assert (row["tokens_per_round"], row["rows_per_round"], row["v"]) == (2, 2, 1.25)
    assert row["split"] == {"draft": 0.0, "verification": 0.0, "rest": 1.0}
    assert row["tokens_per_second"] == 2.0
    assert bench.at_K(results, KEY, 2, prediction, {3: 1.5})["measured"] is None


def test_noise_is_that_of_the_repeats_of_plain_decoding():
    def prompt(*seconds):
        return {"plain": [generation(1.0 + s, *[answered(0, 0)] * 5) for s in seconds]}

    assert bench.noise([prompt(4.0, 4.0), prompt(2.0, 2.0)]) == 0
    # rates 1.1 and 0.9 of their mean: sigma = sqrt(0.02 / 1); one prompt, two repeats
    got = bench.noise([prompt(4 / 1.1, 4 / 0.9)])
    assert got == pytest.approx(2 * 1.25 * 0.02**0.5 * 1.5**0.5)
    assert bench.noise([prompt(4 / 1.1, 4 / 0.9)] * 4) == pytest.approx(got / 2)


def test_plain_decoding_frames_the_runs_and_every_setup_has_its_way(target):
    class Named:
        def __init__(self, way):
            self.way = way

        def __getattr__(self, name):
            return getattr(target, name)

        def __call__(self, *args, **kwargs):
            order.append(self.way)
            return target(*args, **kwargs)

    order, ticks = [], []
    models = {way: Named(way) for way in ("int4 serial", "int4 batched")}
    pair = [
        setup(Ks=(1, 2), way="int4 serial", number="4"),
        setup(Ks=(2,), way="int4 batched", number="5"),
    ]
    tick = lambda s, K: ticks.append((s.number, K))  # noqa: E731
    results = bench.measure(pair, models, PROMPT, tick, max_new_tokens=8)
    assert ticks == [("5", 0), ("4", 1), ("4", 2), ("5", 2), ("5", 0)]
    changes = [way for i, way in enumerate(order) if i == 0 or way != order[i - 1]]
    assert changes == ["int4 batched", "int4 serial", "int4 batched"]
    serial, batched = pair[0].key, pair[1].key
    assert set(results) == {"plain", (serial, 1), (serial, 2), (batched, 2)}
    assert len(results["plain"]) == 2
    assert all(a.tokens == results["plain"][0].tokens for a in results["plain"])


def test_ways_of_one_pair_do_not_answer_for_each_other(target):
    """Serial and batched under one number, as --quantize has them: each keeps its own answers."""
    pair = [setup(Ks=(1,), way=f"int4 {way}", number="P") for way in ("serial", "batched")]
    models = dict.fromkeys([s.way for s in pair], target)
    ran = []

    def tick(s, K):
        ran.append((s.way, K))

    results = bench.measure(pair, models, PROMPT, tick, max_new_tokens=8)
    answers = [results[s.key, 1] for s in pair]
    assert answers[0] is not answers[1] and len([K for _, K in ran if K]) == 2


def test_an_answer_too_short_to_time_is_left_out(target, capsys):
    def measured(K, N):
        tick = lambda s, K: None  # noqa: E731
        models = {"float32": target}
        return bench.measure([setup(Ks=(1, K))], models, PROMPT, tick, max_new_tokens=N)

    assert measured(8, 17) is None and "left out: 17 tokens" in capsys.readouterr().err
    assert measured(8, 18) is not None and capsys.readouterr().err == ""


def test_without_one_long_answer_there_is_an_error(target):
    prompts = {kind: [PROMPT] for kind in KINDS}
    passes = {"float32": {1: 1.0}}
    with pytest.raises(ValueError, match="too short to time"):
        bench.measure_all([setup(Ks=(8,), tokens=8)], {"float32": target}, prompts, passes)


# ---------------------------------------------------------------- verdicts


def row(tokens, draft, verification, rest=0.0, K=4, rows=None, acceptance=(0.6, 0.5, 0.3, 0.2)):
    return dict(
        K=K, measured=tokens / (draft + verification + rest), tokens_per_round=tokens,
        rows_per_round=rows or K + 1, acceptance=list(acceptance), by_prompt=[0.3, 0.5],
        split=dict(draft=draft, verification=verification, rest=rest),
    )  # fmt: skip


def test_a_serial_verification_is_named_with_what_a_parallel_one_would_give():
    text = bench.verdict(row(2.0, 0.08, 4.9), parallel=1.15)
    assert text.startswith("0.40x at K=4 (0.30x to 0.50x by prompt)")
    assert "5.0 rows take 4.90 steps; with 1.15" in text
    assert f"{2.0 / (0.08 + 1.15):.2f}x" in text


def test_a_slow_draft_is_named_with_its_break_even():
    text = bench.verdict(row(4.6, 10.0, 1.2))
    assert "draft is not fast enough, 2.50 steps a proposal" in text
    assert f"break-even {(4.6 - 1.2) / 4:.2f}" in text and f"acceptance {5 / 11.2:.2f}x" in text


def test_a_draft_that_is_fast_enough_is_limited_by_acceptance():
    text = bench.verdict(row(2.0, 0.2, 1.1))
    assert "acceptance decides, 60 % at the first, 20 % up to number 4" in text
    alpha = bench.break_even_alpha(4, 0.05, {5: 1.1})
    assert f"break-even alpha {100 * alpha:.0f} %" in text


def test_few_proposals_are_named():
    assert "proposals are few, 0.5 a round" in bench.verdict(row(1.1, 0.0, 1.0, rows=1.5))


def test_no_cost_is_blamed_where_acceptance_alone_would_lose():
    """A useless draft loses even if it were free, and with the fastest verification."""
    assert "acceptance decides" in bench.verdict(row(1.02, 0.5, 1.2))


def test_of_two_spoilers_the_one_that_costs_more_is_named():
    assert "verification is not parallel" in bench.verdict(row(2.4, 0.9, 2.2), parallel=1.1)
    assert "draft is not fast enough" in bench.verdict(row(2.4, 1.9, 1.6), parallel=1.1)


def test_what_a_parallel_verification_would_give_is_in_plain_steps():
    """Plain decoding takes 1.5 s a token, the batched pass over 2 rows 3 s: 2 of its steps."""
    plain = generation(7.0, *[answered(0, 0)] * 5)  # 4 tokens in 6 s
    slow = generation(17.0, *[answered(0, 0), answered(1, 1), answered(1, 1)], verification=17.0)
    s = setup(way="int4 serial")
    passes = {"int4 serial": {1: 1.0, 2: 8.0}, "int4 batched": {1: 1.0, 2: 3.0}}
    table = bench.configuration(s, [{"plain": [plain], (s.key, 1): slow}], passes)
    # A round takes 8 s, 5.33 steps, for 2 tokens; in 2 steps it would neither gain nor lose.
    assert "2.0 rows take 5.33 steps; with 2.00 it would be 1.00x" in table["verdict"]


# ---------------------------------------------------------------- passes


def test_passes_are_timed_on_a_synchronised_device_after_a_warm_up(target):
    """Every timed pass lies between two synchronisations, and each kind has one untimed before."""
    events = []

    class Watched(model.Model):
        def __call__(self, tokens, cache, rows):
            events.append(rows)
            return super().__call__(tokens, cache, rows)

    backend = dataclasses.replace(target.backend, synchronize=lambda: events.append("sync"))
    watched = Watched(target.config, target.weights, backend, target.block)
    (times,) = bench.pass_seconds([watched], (1, 2), repeats=3)
    assert set(times) == {1, 2} and min(times.values()) > 0
    forth, back = ["sync", 1, "sync", "sync", 2, "sync"], ["sync", 2, "sync", "sync", 1, "sync"]
    assert events[1:] == (forth + back) * 2


def test_several_targets_are_timed_in_turn(target):
    order = []

    class Watched(model.Model):
        def __call__(self, tokens, cache, rows):
            order.append((self.name, rows))
            return super().__call__(tokens, cache, rows)

    pair = [Watched(target.config, target.weights, target.backend, target.block) for _ in "ab"]
    pair[0].name, pair[1].name = "a", "b"
    times = bench.pass_seconds(pair, (1, 2), repeats=2)
    assert [set(t) for t in times] == [{1, 2}, {1, 2}]
    # Three passes of each wake the processor after the pause, and are not timed.
    turns = [[1, 1, 1, *Ts] for Ts in ([1, 2], [2, 1], [1, 2])]
    assert order[2:] == [(name, T) for turn in turns for name in "ab" for T in turn]


def test_a_context_too_short_to_time_is_one_line(target):
    with pytest.raises(ValueError, match="too short to time 50 rows"):
        bench.pass_seconds([target], (1, 50))


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


def test_one_row_of_four_bits_is_the_same_work_serial_or_batched(monkeypatch):
    def times(models, Ts, repeats):
        asked.append((models, repeats))
        return [{T: (i + 1) * T * 1.0 for T in Ts} for i, _ in enumerate(models)]

    asked: list = []
    monkeypatch.setattr(bench, "pass_seconds", times)
    models = {name: name for name in ("float32", "int4 serial", "int4 batched")}
    found = bench.all_passes(models, quick=False)
    assert asked == [(["float32"], 7), (["int4 serial", "int4 batched"], 5)]
    assert found["int4 serial"][1] == found["int4 batched"][1] == 1.5
    assert found["int4 batched"][2] == 4.0 and list(found["float32"]) == list(range(1, 10))


def test_v_is_in_units_of_the_fastest_one_row_pass_over_the_same_weights():
    passes = {"a x": {1: 2.0, 2: 3.0}, "a": {1: 1.0}, "b": {1: 0.5}}
    assert bench.ratios(passes, "a x") == {1: 2.0, 2: 3.0}
    assert bench.ratios(passes, "b") == {1: 1.0}


# ---------------------------------------------------------------- the whole of it


class StubTokenizer:
    stop = frozenset()

    def chat(self, text, system=None):
        return [1, 2, 3, 1, 2, len(text) % 7]

    def decode(self, ids, special=False):
        return "".join(chr(97 + x % 26) for x in ids)


@pytest.fixture
def tiny(monkeypatch, target):
    replace_the_pair(monkeypatch, target)


def replace_the_pair(monkeypatch, target):

    def load_pair(target_name, draft_name, **backend):
        draft = minispec.load_drafter(draft_name or "ngram", target, None)
        return target, StubTokenizer(), draft

    def pass_seconds(targets, Ts, repeats):
        return [{T: 1.0 + 0.1 * T for T in Ts} for _ in targets]

    monkeypatch.setattr(minispec, "load_pair", load_pair)
    monkeypatch.setattr(bench, "pass_seconds", pass_seconds)


@pytest.fixture
def report(tiny, tmp_path, capsys):
    line = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.svg")]
    assert bench.main([*line, "--target", "some/where"]) == 0
    return json.loads((tmp_path / "b.json").read_text()), capsys.readouterr().out, tmp_path


def test_the_default_run_on_another_backend(monkeypatch, capsys):
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("array_api_compat", reason="array-api-compat is not installed")
    replace_the_pair(monkeypatch, model.load(FOLDER, model.torch_backend("float32", "cpu")))
    assert bench.main(["--backend", "torch", "--quick", "--target", "some/where"]) == 0
    out = capsys.readouterr().out
    assert "configurations 3, 4 and 5 are left out" in out and "2, copy-heavy: " in out


def test_the_default_run_on_a_tiny_target(report):
    found, out, folder = report
    assert json.loads(out.splitlines()[-1]) == found and found["schema"] == bench.SCHEMA
    text = out[out.index("v(T)") :].splitlines()[:-1]
    assert max(map(len, text)) <= 100
    tables = {(t["number"], t["name"]): t for t in found["configurations"]}
    assert set(tables) == {
        ("2", "chat and code"), ("2", "copy-heavy"), ("3", "chat and code"),
        ("4", "chat and code"), ("5", "chat and code"),
    }  # fmt: skip
    for t in tables.values():
        assert [row["K"] for row in t["by_k"]] == list(range(1, 9))
        assert all(row["predicted"] for row in t["by_k"])
        measured = {row["K"]: row["measured"] for row in t["by_k"] if row["measured"]}
        assert t["target"] == "some/where" and t["speedup"] == max(measured.values())
        assert measured[t["best_k"]] == t["speedup"] and f"K={t['best_k']}" in t["verdict"]
        if t["number"] == "2":
            assert t["name"] != "copy-heavy" or list(measured) == [1, 2, 4, 6, 8]
        else:
            best = bench.best_K({row["K"]: row["predicted"] for row in t["by_k"]})
            assert list(measured) == [K for K in range(best - 1, best + 2) if 1 <= K <= 8]
    four, five = tables["4", "chat and code"], tables["5", "chat and code"]
    assert (
        (four["quantize"], four["draft"]) == (five["quantize"], five["draft"]) == ("int4", "ngram")
    )
    assert (folder / "b.svg").read_text().startswith("<?xml")
    assert sorted(f.name for f in folder.iterdir()) == ["b.json", "b.svg"]


def test_two_reports_side_by_side(report, capsys):
    found, _, folder = report
    faster = folder / "c.json"
    for t in found["configurations"]:
        t["speedup"] *= 2
    faster.write_text(json.dumps(found))
    assert bench.main(["--compare", str(folder / "b.json"), str(faster)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if "chat and code" in line or "copy" in line]
    assert [row[-2] for row in rows] == ["2.00"] * 5 and max(map(len, lines[2:])) <= 100
    noises = [2 * t["noise"] for t in found["configurations"]]
    assert [row[-1] for row in rows] == ["yes" if noise >= 1 else "no" for noise in noises]
    faster.write_text(json.dumps(found | {"schema": 1}))
    assert bench.main(["--compare", str(folder / "b.json"), str(faster)]) == 2
    assert "schema" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, ways",
    [
        (["--quick"], ["float32", "int4 serial", "int4 batched"]),
        (["--pair", "a", "ngram"], ["float32"] * 2),
        (["--pair", "a", "ngram", "--quantize", "int4"], ["int4 serial", "int4 batched"] * 2),
        (["--temperature", "1", "--quick"], ["float32"] * 2),
    ],
)
def test_what_is_measured_on_request(tiny, tmp_path, capsys, options, ways):
    assert bench.main([*options, "--json", str(tmp_path / "b.json")]) == 0
    tables = json.loads((tmp_path / "b.json").read_text())["configurations"]
    assert [t["verification"] for t in tables] == ways
    warm = "--temperature" in options
    for t in tables:
        rows = [row for row in t["by_k"] if row["measured"]]
        assert rows and all((row["predicted"] is None) == warm for row in t["by_k"])
    out = capsys.readouterr().out
    assert max(map(len, out[out.index("v(T)") :].splitlines()[:-1])) <= 100
    assert ("token for token" in out) != warm  # above 0 they have other draws


def test_rules_and_drafters_side_by_side(tiny, tmp_path, capsys):
    line = ["--rules", "--quick", "--draft", "early:1", "--json", str(tmp_path / "r.json")]
    assert bench.main(line) == 0
    found = json.loads((tmp_path / "r.json").read_text())["rules"]
    cells = [(row["temperature"], row["verify"]) for row in found]
    assert cells == [(t, rule) for t in (0.0, 0.6, 1.0) for rule in minispec.RULES]
    greedy = [(row["acceptance"], row["tokens_per_round"]) for row in found[:3]]
    assert len(set(greedy)) == 1  # at temperature 0 all rules do the same
    for row in found:
        assert 0 <= row["acceptance"] <= 1 <= row["tokens_per_round"] and row["speedup"] > 0
    out = capsys.readouterr().out
    assert out.count("early:1") == 3 and max(map(len, out.splitlines())) <= 100
    assert bench.main(["--rules", "--full"]) == 2
    assert "--rules has no use for --full" in capsys.readouterr().err


def test_the_studys_five_configurations_and_what_is_beside_them():
    drafts = {name: object() for name in ("trained", "chain", "ngram", "int4")}
    setups = bench.five_configurations(drafts, bench.SIZES["default"], quick=False)
    facts = {(s.number, s.group): (s.way, s.draft) for s in setups}
    chat, copy = bench.GROUPS
    assert facts == {
        ("1", chat): ("float32", drafts["trained"]), ("1+2", chat): ("float32", drafts["chain"]),
        ("2", chat): ("float32", drafts["ngram"]), ("2", copy): ("float32", drafts["ngram"]),
        ("3", chat): ("float32", drafts["int4"]), ("4", chat): ("int4 serial", drafts["trained"]),
        ("5", chat): ("int4 batched", drafts["trained"]),
        ("C", chat): ("float32 plain", drafts["trained"]),
    }  # fmt: skip
    assert [s.number for session in bench.sessions_of(setups) for s in session] == [
        "1", "1+2", "2", "2", "3", "4", "5", "C"
    ]  # fmt: skip
    assert list(map(len, bench.sessions_of(setups))) == [3, 1, 1, 2, 1]
    every = bench.five_configurations(drafts, bench.SIZES["full"], quick=False)
    assert {(s.number, s.group) for s in every} == {*facts, ("1+2", copy)}
    assert all(list(s.Ks) == list(range(1, 9)) for s in every if s.number in ("1", "1+2", "2"))
    del drafts["trained"], drafts["chain"]
    without = bench.five_configurations(drafts, bench.SIZES["default"], quick=False)
    assert [s.number for s in without] == ["2", "2", "3", "4", "5", "C"]
    assert without[3].draft is drafts["ngram"]


def test_the_best_K_and_its_neighbours_are_measured():
    def chosen(best, tokens=48, beside=1):
        s = setup(Ks=(), tokens=tokens)
        s.predictions = {K: bench.Prediction(2.0 - abs(K - best), 0, 0, 0, []) for K in range(1, 9)}
        s.settle(beside)
        return s.Ks

    assert (chosen(1), chosen(4), chosen(8)) == ([1, 2], [3, 4, 5], [7, 8])
    assert (chosen(4, beside=0), chosen(8, tokens=14)) == ([4], [6])


@pytest.mark.parametrize(
    "options, words",
    [
        (["--json", "/nowhere/b.json"], "cannot write"),
        (["--plot", "/nowhere/b.png"], "cannot write"),
        (["--plot", "b.pdf"], ".png or .svg"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "1", "--quantize", "int4"], "temperature 0"),
        (["--draft", "no-such-draft"], "no-such-draft"),
        (["--prompts", "/nowhere/p.json"], "p.json"),
        (["--prompts", str(FOLDER / "config.json")], "measured"),
        (["--compare", "/nowhere/a.json", "b.json"], "a.json"),
        (["--compare", str(FOLDER / "config.json"), "b.json"], "schema"),
        (["--backend", "abacus"], "abacus"),
        (["--verification", "--plot", "b.png"], "--verification has no use for --plot"),
        (["--compare", "a.json", "b.json", "--quick"], "--compare has no use for --quick"),
        (["--pair", "a", "ngram", "--draft", "ngram"], "--pair names target and draft"),
        (["--quick", "--full"], "not allowed"),
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


def test_a_plot_without_matplotlib_is_refused_before_the_work(tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench.main(["--plot", "b.png"]) == 2
    assert "pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    "part, damage, words",
    [
        ("calibration", [], "needs calibration prompts"),
        ("measured", {"chat": "one"}, "measured, chat must be a list of texts"),
        ("measured", {"chat": [1]}, "measured, chat"),
        ("calibration", {"chat": [" "]}, "none empty"),
        ("calibration", {kind: [] for kind in KINDS[:3]}, "no calibration prompts for chat"),
        ("measured", {"code": []}, "code needs measured and calibration prompts"),
        ("measured", {"quote": ["calibration text"]}, "quote needs .* that differ"),
        ("measured", {"quotes": ["a"]}, "of the kinds"),
    ],
)
def test_a_prompts_file_of_the_wrong_kind_is_refused(tmp_path, part, damage, words):
    whole = {p: {kind: [f"{p} text"] for kind in KINDS} for p in ("measured", "calibration")}
    file = tmp_path / "p.json"
    file.write_text(json.dumps(whole | {"more": 1}))
    assert bench.read_prompts(file) == whole
    broken = damage if isinstance(damage, list) else whole[part] | damage
    file.write_text(json.dumps(whole | {part: broken}))
    with pytest.raises(ValueError, match=words):
        bench.read_prompts(file)


def test_a_kind_may_be_left_out_of_both_parts(tmp_path):
    kinds = {"chat": ["measured"], "quote": ["m"]}, {"chat": ["calibration"], "quote": ["c"]}
    file = tmp_path / "p.json"
    file.write_text(json.dumps(dict(zip(("measured", "calibration"), kinds))))
    found = bench.read_prompts(file)
    assert found["measured"]["chat"] == ["measured"] and found["calibration"]["code"] == []


def test_committed_prompts_are_read_and_enough():
    prompts = bench.read_prompts(bench.PROMPTS)
    for part, kinds in prompts.items():
        assert all(len(texts) >= 2 for texts in kinds.values()), part
    measured = {t for texts in prompts["measured"].values() for t in texts}
    assert not measured & {t for texts in prompts["calibration"].values() for t in texts}


def test_rounded():
    assert bench.rounded({"a": [1.23456, 7, None, "x"]}) == {"a": [1.235, 7, None, "x"]}
