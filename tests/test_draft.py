"""Contract: a draft conditioned on the target's states computes what its definition says.

    draft input at token t   join [norm(embedding of x_t), norm(state of x_(t-1))]
    the state of a token     the target's where the target has computed it, else the draft's guess
    q                        softmax over the head's tokens, 0 for all others

Whatever was accepted, rejected or cached before: after every round the next proposals are those of
a computation from scratch. And the output law stays the target's, as with every draft.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from test_cli import CONFIG as TARGET
from test_cli import checkpoint
from toys import distance, law_of

import minispec
import model

N, D = 40, TARGET["hidden_size"]
PROMPT = [7, 3, 11, 3, 11]
FACTS = dict(layers=2, width=12, heads=3, kv_heads=1, hidden=20, vocab=300)
CONFIG = TARGET | dict(
    model_type="minispec_draft", num_hidden_layers=1, head_size=N, target=FACTS,
    rms_norm_eps=1e-5,
)  # fmt: skip


def write_draft(folder, seed=3, ids=None, **changes):
    rng, config = np.random.default_rng(seed), CONFIG | changes
    c = model.draft_config(config)
    tensors = {}
    for name, key, letters in model.DRAFT_WEIGHTS:
        if name not in c.absent:
            shape = [c.size(dim) for dim in letters.split()]
            W = rng.standard_normal(shape) * 0.4 + ("norm" in name)
            tensors[key.format(l=0)] = W.astype(np.float32)
    ids = np.sort(rng.permutation(300)[:N]) if ids is None else np.array(ids)
    tensors["lm_head.ids"] = ids.astype(np.float32)
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("draft")
    return checkpoint(base / "target"), write_draft(base / "draft")


@pytest.fixture(scope="module", params=["plain", "tiles"])
def pair(folders, request):
    target = model.load(folders[0], model.numpy_backend("float64", request.param))
    return target, model.load_draft(folders[1], target)


def by_definition(m, tokens, states):
    """q's logits [V] after `tokens`, states [len(tokens) - 1, D] known, one position at a time."""
    w, eps = m.weights, m.config.eps
    tensor = lambda W: W.rows(range(W.shape[0])) if isinstance(W, model.Tiles) else W  # noqa: E731
    layer = {name: tensor(W) for name, W in w["layers"][0].items()}
    norm = lambda x, weight: x / np.sqrt(np.mean(x**2) + eps) * weight  # noqa: E731
    H, C, F = 3, 4, 20
    keys, values = [], []
    for t, x in enumerate(tokens):
        embedded = norm(tensor(w["embed"])[x], w["embed_norm"])
        back = norm(states[t - 1] if t else np.zeros(D), w["state_norm"])
        z = tensor(w["join"]) @ np.concatenate([embedded, back])
        heads = (layer["qkv"] @ norm(z, layer["attn_norm"])).reshape(-1, C)
        angle = t * np.array(m.config.inv_freq)
        turned = []
        for head in heads[: H + 1]:
            c = (head[: C // 2] + 1j * head[C // 2 :]) * np.exp(1j * angle)
            turned.append(np.concatenate([c.real, c.imag]))
        keys.append(turned[H]), values.append(heads[H + 1])
        out = []
        for h in range(H):
            e = np.exp(np.array(keys) @ turned[h] / np.sqrt(C))
            out.append(e @ np.array(values) / e.sum())
        z = z + layer["o"] @ np.concatenate(out)
        gate, up = np.split(layer["gate_up"] @ norm(z, layer["mlp_norm"]), [F])
        z = z + layer["down"] @ (gate / (1 + np.exp(-gate)) * up)
    state = norm(z, w["norm"])
    logits = np.full(m.vocab, -np.inf)
    logits[w["head_ids"].astype(int)] = tensor(w["head"]) @ state
    return logits, state


class Checked:
    """A StateDraft; compares every q that it gives with the definition, on fresh states."""

    def __init__(self, draft, target, law):
        self.inner = minispec.StateDraft(draft)
        self.target, self.law, self.compared = target, law, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def propose(self, tokens, K, law, randomness):
        proposals, q = self.inner.propose(tokens, K, law, randomness)
        fresh = self.target.new_cache(len(tokens))
        self.target(tokens, fresh, rows=1)
        states = list(fresh.states[: len(tokens) - 1])
        for i, given in enumerate(q):
            logits, state = by_definition(self.inner.model, tokens + proposals[:i], states)
            assert np.abs(given - self.law(logits)).max() < 1e-10
            states.append(state)
            self.compared += 1
        return proposals, q


def check_rounds(target, draft, K=3, N=25, seed=0, temperature=1.0):
    law = minispec.sampling_law(temperature, None, 1.0)
    checked = Checked(draft, target, law)
    rounds = list(
        minispec.generate(
            target, PROMPT, checked, K, max_new_tokens=N, temperature=temperature,
            randomness=minispec.Randomness(seed),
        )
    )  # fmt: skip
    return rounds, checked.compared


def test_every_proposal_is_that_of_the_definition(pair):
    target, draft = pair
    counts = set()
    for seed in range(4):
        rounds, compared = check_rounds(target, draft, seed=seed, temperature=3.0)
        assert compared == sum(len(r.proposals) for r in rounds) > 20
        counts |= {r.accepted for r in rounds if len(r.proposals) == 3}
    assert {0, 1} <= counts


def test_the_definition_holds_after_full_acceptance(pair):
    # A target at a very high temperature is nearly uniform, and so is the draft over its tokens;
    # with a head of all tokens nearly everything is accepted.
    target, _ = pair
    rounds, compared = check_rounds(target, all_tokens_draft(target), temperature=1e4)
    assert compared and sum(r.accepted == len(r.proposals) == 3 for r in rounds) > 3


def all_tokens_draft(target):
    config = model.draft_config(CONFIG | {"head_size": 300})
    rng, size = np.random.default_rng(5), config.size
    layer = dict(
        attn_norm=np.ones(D), mlp_norm=np.ones(D), qkv=rng.normal(size=(20, D)),
        o=rng.normal(size=(D, D)), gate_up=rng.normal(size=(40, D)), down=rng.normal(size=(D, 20)),
    )  # fmt: skip
    w = dict(
        layers=[layer], embed_norm=np.ones(D), state_norm=np.ones(D), norm=np.ones(D),
        join=rng.normal(size=(D, size("2D"))), head=rng.normal(size=(300, D)),
        head_ids=np.arange(300.0),
    )  # fmt: skip
    return model.StateDraftModel(config, tiled(w, target), target)


def tiled(w, target):
    """The same weights, kept as the target's backend keeps its own."""
    if isinstance(w, dict):
        return {name: tiled(value, target) for name, value in w.items()}
    if isinstance(w, list):
        return [tiled(value, target) for value in w]
    (place,) = target.backend.empty([w.shape])
    place[0 : len(w)] = w
    return place


def test_the_definition_for_one_pair():
    """Killer of mutants: one target and draft without files."""
    target = small_target()
    check_rounds(target, all_tokens_draft(target), temperature=3.0)
    check_rounds(target, all_tokens_draft(target), temperature=1e4)


def small_target():
    config = model.llama_config(TARGET)
    rng = np.random.default_rng(8)
    layer = lambda: dict(  # noqa: E731
        attn_norm=np.ones(D), mlp_norm=np.ones(D), qkv=rng.normal(size=(20, D)),
        o=rng.normal(size=(D, D)), gate_up=rng.normal(size=(40, D)), down=rng.normal(size=(D, 20)),
    )  # fmt: skip
    w = dict(layers=[layer(), layer()], embed=rng.normal(size=(300, D)), norm=np.ones(D))
    return model.Model(config, w, model.numpy_backend("float64"), model.llama_block)


def test_a_trimmed_head_by_hand():
    target = small_target()
    draft = all_tokens_draft(target)
    draft.weights["head"] = np.eye(2, D)
    draft.know(np.array([5, 299]))
    logits = draft.head(np.arange(1.0, 13.0)[None])[0]
    assert np.flatnonzero(np.isfinite(logits)).tolist() == [5, 299]
    assert (logits[5], logits[299]) == (1.0, 2.0)


def test_a_long_prompt_in_pieces_gives_the_same_proposals():
    target, prompt = small_target(), [(7 * i) % 300 for i in range(40)]
    draft = all_tokens_draft(target)
    q = []
    for longest in 512, 6:
        draft.LONGEST_PASS = longest
        drafter = minispec.StateDraft(draft)
        randomness = minispec.Randomness(1)
        rounds = minispec.generate(
            target, prompt, drafter, 3, max_new_tokens=6, temperature=2.0, randomness=randomness
        )
        q.append([r.q for r in rounds])
    assert np.allclose(q[0][1], q[1][1], atol=1e-12) and len(q[0][1]) == 3


def test_the_first_round_has_no_states_and_proposes_nothing(pair):
    rounds, _ = check_rounds(*pair)
    assert rounds[0].proposals == [] and len(rounds[1].proposals) == 3


def test_the_output_law_is_the_targets(pair):
    target, draft = pair
    options = dict(max_new_tokens=3, temperature=4.0, top_k=2)
    plain = law_of(
        lambda r: tuple(minispec.autoregressive(target, PROMPT, randomness=r, **options))
    )

    def text(randomness):
        rounds = minispec.generate(
            target, PROMPT, minispec.StateDraft(draft), 2, randomness=randomness, **options
        )
        return tuple(x for r in rounds for x in r.tokens)

    assert distance(law_of(text), plain) < 1e-12


def test_past_its_context_the_draft_is_silent_and_the_text_goes_on(pair):
    target, draft = pair
    short = dataclasses.replace(draft.config, context=12)
    shorter = model.StateDraftModel(short, draft.weights, target)
    rounds = list(
        minispec.generate(target, PROMPT, minispec.StateDraft(shorter), 3, max_new_tokens=30)
    )
    plain = list(minispec.autoregressive(target, PROMPT, max_new_tokens=30))
    assert [x for r in rounds for x in r.tokens] == plain
    assert rounds[-2].proposals == [] and rounds[1].proposals


def test_only_the_heads_tokens_are_proposed(pair):
    target, draft = pair
    known = set(draft.head_ids.tolist())
    rounds, _ = check_rounds(target, draft, temperature=9.0)
    proposed = {x for r in rounds for x in r.proposals}
    assert proposed <= known and len(proposed) > 5


# --- early exit ---------------------------------------------------------------------------------


class CheckedExit(minispec.EarlyExit):
    """Compares every q with a pass of the first layers from scratch, and counts them."""

    def propose(self, tokens, K, law, randomness):
        proposals, q = super().propose(tokens, K, law, randomness)
        for i, given in enumerate(q):
            text = tokens + proposals[:i]
            fresh = self.model(text, self.model.new_cache(len(text)), rows=1)[0]
            assert np.abs(given - law(fresh)).max() < 1e-10
            self.compared = getattr(self, "compared", 0) + 1
        return proposals, q


def test_an_early_exit_proposes_what_the_first_layers_say():
    target = small_target()
    draft = CheckedExit(model.first_layers(target, 1))
    options = dict(max_new_tokens=30, temperature=3.0)
    for temperature in 3.0, 1e4:  # at the second nearly everything is accepted
        options["temperature"] = temperature
        rounds = list(
            minispec.generate(
                target, PROMPT, draft, 3, randomness=minispec.Randomness(1), **options
            )
        )
        assert rounds[0].proposals == [] and len(rounds[1].proposals) == 3
    assert any(r.accepted == 3 for r in rounds) and draft.compared > 30


def test_what_an_early_exit_leaves_in_the_targets_cache_is_never_read():
    target, seen = small_target(), []

    def remember(capacity, new_cache=target.new_cache):
        seen.append(new_cache(capacity))
        return seen[-1]

    target.new_cache = remember
    draft = minispec.EarlyExit(model.first_layers(target, 1))
    tokens = list(PROMPT)
    for r in minispec.generate(target, PROMPT, draft, 3, max_new_tokens=20, temperature=3.0,
                               randomness=minispec.Randomness(4)):  # fmt: skip
        tokens += r.tokens
        fresh = model.Cache(target.config, len(tokens), target.backend)
        target(tokens[:-1], fresh, rows=1)
        n = seen[0].length
        assert n == fresh.length == len(tokens) - 1
        for ours, theirs in ((seen[0].v, fresh.v), (seen[0].states[None, None], fresh.states)):
            assert np.abs(ours[:, :, :n] - theirs[..., :n, :]).max() < 1e-10


@pytest.mark.parametrize("rule", minispec.RULES)
def test_the_output_law_with_an_early_exit_is_the_targets(rule):
    target = small_target()
    options = dict(max_new_tokens=3, temperature=4.0, top_k=2)
    plain = law_of(
        lambda r: tuple(minispec.autoregressive(target, PROMPT, randomness=r, **options))
    )

    def text(randomness):
        draft = minispec.EarlyExit(model.first_layers(target, 1))
        rounds = minispec.generate(
            target, PROMPT, draft, 2, randomness=randomness, verify=minispec.RULES[rule], **options
        )
        return tuple(x for r in rounds for x in r.tokens)

    assert distance(law_of(text), plain) < 1e-12


@pytest.mark.parametrize("layers", [0, 2, 9])
def test_an_exit_that_leaves_out_nothing_or_all_is_refused(layers):
    with pytest.raises(ValueError, match=f"after layer 1 to 1 of 2, not {layers}"):
        model.first_layers(small_target(), layers)


@pytest.mark.parametrize(
    "name", ["early", "early:1", "ngram:1-3", "ngram:2-2:frequent", "ngram,early", "int4"]
)
def test_drafters_without_files_by_their_names(folders, capsys, name):
    texts = []
    for draft in ("none", name):
        line = ["--target", str(folders[0]), "--draft", draft, "-n", "20", "hello hello"]
        assert minispec.main(line) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    target = model.load(folders[0])
    assert minispec.load_drafter(name, target, None).name == name


@pytest.mark.parametrize(
    "name, words",
    [
        ("early:0", "early exit is after layer 1"),
        ("early:x", "one of none, ngram"),
        ("ngram:3", "one of none, ngram"),
        ("ngram:3-2", "shortest <= longest"),
        ("int4:8", "one of none, ngram"),
    ],
)
def test_names_that_nearly_fit_are_one_clear_line(folders, capsys, name, words):
    assert minispec.main(["--target", str(folders[0]), "--draft", name, "hello"]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


# --- chains -------------------------------------------------------------------------------------


def test_a_chain_asks_in_order_and_rolls_all_back(pair):
    target, draft = pair
    chain = minispec.Chain([minispec.PromptLookup(2, 2), minispec.StateDraft(draft)])
    kept, rounds = [], []
    for r in minispec.generate(target, PROMPT, chain, 3, max_new_tokens=25, temperature=2.0,
                               randomness=minispec.Randomness(2)):  # fmt: skip
        rounds.append(r)
        kept.append(chain.drafters[1].cache.length)
    assert rounds[0].proposals == [3, 11, 3] or rounds[0].proposals[0] == 3  # 3, 11 occurred before
    assert any(q < 1 for r in rounds for q in r.q)  # the model drafted too
    total = len(PROMPT)
    for r, length in zip(rounds, kept):
        total += len(r.tokens)
        assert length <= total - 1
    plain = list(minispec.autoregressive(target, PROMPT, max_new_tokens=25))
    greedy = minispec.generate(target, PROMPT, chain, 3, max_new_tokens=25)
    assert [x for r in greedy for x in r.tokens] == plain


def test_a_chain_of_two():
    """The first drafter speaks every other round; whatever it does, the second's cache is right."""
    target = small_target()

    class Sometimes(minispec.PromptLookup):
        def propose(self, tokens, K, law, randomness):
            proposals = super().propose(tokens, K, law, randomness)
            return proposals if len(tokens) % 2 else ([], [])

    law = minispec.sampling_law(3.0, None, 1.0)
    checked = Checked(all_tokens_draft(target), target, law)
    chain = minispec.Chain([Sometimes(1, 1), checked])
    rounds = list(
        minispec.generate(
            target, PROMPT, chain, 3, max_new_tokens=40, temperature=3.0,
            randomness=minispec.Randomness(3),
        )
    )  # fmt: skip
    copied = sum(r.q == [1.0] * len(r.q) for r in rounds if r.proposals)
    assert copied > 0 and checked.compared > 20
    assert all(r.cached[1] <= r.cached[0] for r in rounds)


def test_a_chain_of_silent_drafters_is_silent():
    chain = minispec.Chain([minispec.Drafter(), minispec.Drafter()])
    chain.start(5, 9)
    assert chain.propose([1], 2, None, None) == ([], []) and chain.cached == 0


# --- loading ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(target=FACTS | {"layers": 30}), "target of 30 layers, this one has 2"),
        (dict(target=None), "None layers"),
        (dict(target=7), "None layers"),
        (dict(head_size=None), "head_size"),
        (dict(head_size=39), "shape"),
        (dict(vocab_size=299), "vocabulary of its target"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(folders, tmp_path, changes, words):
    target = model.load(folders[0])
    write_draft(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(ValueError, match=words):
        model.load_draft(tmp_path, target)


@pytest.mark.parametrize("bad", [-1, 300])
def test_head_ids_outside_the_vocabulary_are_refused(folders, tmp_path, bad):
    write_draft(tmp_path, ids=[bad, *range(N - 1)])
    with pytest.raises(ValueError, match="outside the target's vocabulary"):
        model.load_draft(tmp_path, model.load(folders[0]))


def test_the_command_line_takes_it_alone_and_in_a_chain(folders, capsys, tmp_path):
    target, draft = map(str, folders)
    texts = []
    for name in ("none", draft, f"ngram,{draft}"):
        line = ["--target", target, "--draft", name, "-n", "20", "hello hello"]
        assert minispec.main(line) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert minispec.main(["--target", target, "--draft", "ngram,nothing", "hello"]) == 2
    assert "nothing" in capsys.readouterr().err
    assert minispec.main(["--target", draft, "hello"]) == 2
    assert "minispec_draft" in capsys.readouterr().err


def test_a_folder_says_what_it_is(folders):
    assert [model.is_draft(Path(f)) for f in folders] == [False, True]
