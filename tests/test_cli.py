"""Contract: the command line answers, or says in one line what is wrong and ends with status 2.

A tiny random checkpoint stands in for a real one: 300 ids, a byte-level tokenizer, a chat template.
What a wrong input must not do: show a traceback, print a second line, leave anything on disk.
"""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tokenizers

import minispec
import model

ROOT = Path(__file__).resolve().parents[1]
CONFIG = dict(
    model_type="llama", vocab_size=300, hidden_size=12, intermediate_size=20, num_hidden_layers=2,
    num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=200,
    tie_word_embeddings=True, eos_token_id=299,
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_weights(folder, config, seed=0):
    """Random weights of every shape that the config asks for."""
    rng, c = np.random.default_rng(seed), model.llama_config(config)
    tensors = {}
    for name, key, letters in model.LLAMA_WEIGHTS:
        for layer in range(c.layers if "{l}" in key else 1):
            if name not in c.absent:
                shape = [c.size(dim) for dim in letters.split()]
                W = rng.standard_normal(shape) * 0.5 + ("norm" in name)
                tensors["model." + key.format(l=layer)] = W.astype(np.float16)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def save_tokenizer(folder, swap=False, words=None):
    """Byte-level BPE without merges: 256 bytes, then fillers up to 299 ids, then the stop token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = alphabet + [f"<filler {i}>" for i in range(299 - len(alphabet))]
    if swap:
        names[0], names[1] = names[1], names[0]
    names = words or names
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({name: i for i, name in enumerate(names)}, [])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    inner.save(str(folder / "tokenizer.json"))
    about = dict(eos_token="<end>", chat_template=TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def checkpoint(folder, seed=0, swap=False, words=None, **changes):
    folder.mkdir()
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_weights(folder, config, seed)
    save_tokenizer(folder, swap, words)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("cli") / "target")


@pytest.fixture
def say(target, capsys, monkeypatch):
    """say(*options) -> status, stdout, stderr of the command line on the tiny target."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)

    def run(*options, prompt="hello hello hello"):
        prompts = [] if prompt is None else [prompt]
        try:
            status = minispec.main(["--target", str(target), "-n", "12", *options, *prompts])
        except SystemExit as end:  # argparse's own way out
            status = end.code
        except KeyboardInterrupt:  # would end pytest
            status = "KeyboardInterrupt"
        return status, *capsys.readouterr()

    return run


def command(*options, **kwargs):
    return subprocess.run(
        [sys.executable, str(ROOT / "minispec.py"), *map(str, options)],
        capture_output=True, text=True, timeout=60, **kwargs,
    )  # fmt: skip


# --- wrong input -------------------------------------------------------------------------------


def assert_one_line(result, *words):
    status, out, error = result
    assert (status, out, error.count("\n")) == (2, "", 1), result
    assert "Traceback" not in error and all(word in error for word in words), error


@pytest.mark.parametrize("options, word", [
    (["-K", "-1"], "K must be >= 0"),
    (["-K", "two"], "-K"),
    (["-n", "-1"], "max_new_tokens"),
    (["--temperature", "-1"], "temperature"),
    (["--temperature", "nan"], "temperature"),
    (["--top-p", "0"], "top_p"),
    (["--top-p", "1.5"], "top_p"),
    (["--top-k", "-1"], "top_k"),
    (["--seed", "-1"], "seed"),
    (["--json", "/nowhere/at/all.json"], "cannot write"),
    (["--json", "/"], "cannot write"),
    (["--draft", "nothing-of-the-kind"], "nothing-of-the-kind"),
    (["--target", "/nowhere/at/all"], "/nowhere/at/all"),
    (["--verify", "magic"], "--verify"),
    (["--quantize", "int3"], "--quantize"),
    (["--quantize", "int4", "--draft", "int4"], "go into int4"),
    (["--no-such-option"], "--no-such-option"),
])  # fmt: skip
def test_a_wrong_option_is_one_line(say, tmp_path, monkeypatch, options, word):
    monkeypatch.chdir(tmp_path)
    assert_one_line(say("--json", "out.json", *options), word)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_prompt_is_one_line(say, target):
    for prompt in ("", " \n"):
        assert_one_line(say(prompt=prompt), "empty")
    for dash in ([], ["-"]):
        piped = command("--target", target, *dash, input="")
        assert_one_line((piped.returncode, piped.stdout, piped.stderr), "empty")


def test_a_prompt_that_is_not_utf8_is_one_line(target):
    line = [sys.executable, ROOT / "minispec.py", "--target", target]
    for *words, piped in (b"caf\xe9", b""), (b"-", b"caf\xe9"), (b"hi", b"--system", b"\xe9", b""):
        done = subprocess.run([*line, *words], input=piped, capture_output=True, timeout=60)
        assert_one_line((done.returncode, done.stdout.decode(), done.stderr.decode()))


def test_a_prompt_past_the_context_is_one_line(say):
    assert_one_line(say(prompt="x" * 500), "context of 200")


def truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def wrong_shape(folder):
    save_weights(folder, CONFIG | {"intermediate_size": 21})


def unknown_family(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "rnn"}))


def missing_weights(folder):
    (folder / "model.safetensors").unlink()


def missing_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def nan_weights(folder):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("damage, words", [
    (truncated, ["model.safetensors", "truncated"]),
    (wrong_shape, ["[21, 12]", "[20, 12]", "gate_proj"]),
    (unknown_family, ["rnn", "gpt2"]),
    (missing_weights, ["model.safetensors"]),
    (missing_tokenizer, ["tokenizer.json"]),
    (nan_weights, ["NaN"]),
])  # fmt: skip
def test_a_damaged_checkpoint_is_one_line(say, target, tmp_path, damage, words):
    folder = Path(shutil.copytree(target, tmp_path / "damaged"))
    damage(folder)
    before = sorted(tmp_path.rglob("*"))
    status, out, error = say("--target", str(folder), "--json", str(tmp_path / "out.json"))
    assert_one_line((status, out.strip(), error), *words)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_draft_of_another_vocabulary_is_one_line(say, tmp_path):
    draft = checkpoint(tmp_path / "draft", words=["other", "words", "only"])
    assert_one_line(say("--draft", str(draft)), "different vocabularies", "too few to draft with")


def test_a_target_that_the_trained_draft_does_not_fit_says_so_once(say):
    assert say("-n", "3")[2].count("the trained draft does not fit this target") == 1
    assert "does not fit" not in say("-n", "3", "--draft", "ngram")[2]


# --- right input -------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [290, 320])
def test_a_draft_that_is_padded_to_another_width_works(say, tmp_path, vocab):
    draft = checkpoint(tmp_path / "draft", seed=1, vocab_size=vocab)
    assert say("--draft", str(draft))[:2] == say("--draft", "none")[:2]
    hot = "--draft", str(draft), "--temperature", "9", "--seed", "1", "-n", "100"
    assert say(*hot)[0] == 0  # the target emits every id, those past the draft's last too


FIELDS = dict(
    version=str, target=str, draft=str, verify=str, K=int, seed=int, backend=str, device=str,
    dtype=str, prompt_tokens=int, tokens=list, text=str, ended=str, seconds=float,
    tokens_per_second=float, proposals=int, acceptance=float, tokens_per_round=float,
    target_passes=int, seconds_draft=float, seconds_verification=float, seconds_sampling=float,
    seconds_other=float,
)  # fmt: skip


def test_json_has_the_documented_fields_and_they_agree(say, target, tmp_path):
    file = tmp_path / "out.json"
    status, out, _ = say("--json", str(file), "--seed", "3", "--temperature", "1")
    data = json.loads(file.read_text())
    kinds = {name: type(data[name]) for name in FIELDS if data[name] is not None}
    assert status == 0 and kinds == {name: FIELDS[name] for name in kinds}
    assert set(FIELDS) <= set(data) and kinds.keys() >= FIELDS.keys() - {"acceptance"}
    assert data["tokens_per_round"] == len(data["tokens"]) / data["target_passes"]
    assert data["text"] == out.removesuffix("\n") and "<end>" not in data["text"]
    assert data["text"] == model.Tokenizer(target).decode(data["tokens"])
    parts = sum(data[f"seconds_{part}"] for part in ("draft", "verification", "sampling", "other"))
    assert parts == pytest.approx(data["seconds"]) and min(parts, data["seconds_other"]) >= 0
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_json_to_a_link_or_a_pipe_does_not_replace_it(tmp_path):
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "real.json")
    minispec.write_json(link, {"a": 1})
    assert link.is_symlink() and json.loads((tmp_path / "real.json").read_text()) == {"a": 1}
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    minispec.write_json(pipe, {"a": 2})
    assert pipe.is_fifo() and json.loads(os.read(reader, 1000)) == {"a": 2}
    os.close(reader)


def test_a_link_can_be_written_where_its_folder_cannot(tmp_path, monkeypatch):
    # As /dev/stdout for everyone but root: the link's own folder is closed, its end is open.
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    (tmp_path / "real.json").write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    minispec.check_writable(str(tmp_path / "link.json"))
    with pytest.raises(OSError, match="cannot write"):
        minispec.check_writable(str(tmp_path / "other.json"))


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        minispec.write_json(tmp_path / "a.json", {"a": 1})
    assert list(tmp_path.iterdir()) == []


def test_every_draft_gives_plain_decodings_text_at_temperature_0(say, target):
    m, tokenizer = model.load(target), model.Tokenizer(target)
    ids = tokenizer.chat("hello hello hello")
    plain = minispec.autoregressive(m, ids, max_new_tokens=12, stop=tokenizer.stop)
    text = tokenizer.decode(list(plain)) + "\n"
    assert say("--draft", "none")[1] == say("--draft", "ngram")[1] == text
    assert say("--draft", str(target))[1] == say("--draft", "int4")[1] == text


def test_a_target_of_four_bits_gives_its_own_plain_decodings_text(say, target, tmp_path):
    m, tokenizer = model.quantize(model.load(target)), model.Tokenizer(target)
    ids = tokenizer.chat("hello hello hello")
    plain = minispec.autoregressive(m, ids, max_new_tokens=12, stop=tokenizer.stop)
    line = "--quantize", "int4", "--draft", str(target), "--json", str(tmp_path / "a.json")
    assert say(*line)[1] == tokenizer.decode(list(plain)) + "\n"
    assert "int4" in json.loads((tmp_path / "a.json").read_text())["backend"]


def test_a_seed_repeats_a_run(say):
    hot = ["--temperature", "2", "-n", "20"]
    assert say("--seed", "5", *hot)[1] == say("--seed", "5", *hot)[1] != say("--seed", "6", *hot)[1]


def test_a_pipe_and_a_dash_read_standard_input(say, target):
    expected = say("-n", "5")[1]
    for dash in ([], ["-"]):
        piped = command("--target", target, "-n", 5, *dash, input="hello hello hello")
        assert (piped.returncode, piped.stdout) == (0, expected)
        assert "\033" not in piped.stdout + piped.stderr


def test_raw_continues_the_text_and_system_reaches_the_template(say, tmp_path):
    def prompt_tokens(*options):
        say("--json", str(tmp_path / "n.json"), *options)
        return json.loads((tmp_path / "n.json").read_text())["prompt_tokens"]

    text = "hello hello hello"
    assert prompt_tokens("--raw") == len(text)
    assert prompt_tokens() == len(f"<user>{text}\n<assistant>")
    assert prompt_tokens("--system", "be brief") == len(
        f"<system>be brief\n<user>{text}\n<assistant>"
    )


def on_a_terminal(target, **environment):
    """What the command writes to a terminal that is both its stdout and its stderr."""
    ours, theirs = pty.openpty()
    arguments = [
        sys.executable,
        str(ROOT / "minispec.py"),
        "--target",
        str(target),
        "-n",
        "5",
        "hi hi hi",
    ]
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | environment
    with subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 1000):
                shown += data
        except OSError:  # Linux's way to say that the other end is closed
            pass
    os.close(ours)
    return shown.decode()


def test_a_terminal_gets_colours_and_a_legend(target):
    shown = on_a_terminal(target)
    legend, *rest = shown.splitlines()
    assert all(word in legend for word in ("accepted", "corrected", "bonus"))
    assert minispec.BONUS in "".join(rest)


def test_no_color_is_respected(target):
    assert "\033" not in on_a_terminal(target, NO_COLOR="1")


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_trace_shows_coins_that_decide(say, tmp_path, draft):
    draft = draft if draft == "ngram" else str(checkpoint(tmp_path / "draft", seed=1))
    options = ["--draft", draft, "--seed", "1", "--temperature", "0.5", "-n", "40"]
    status, out, _ = say("--trace", *options)
    rows = [line.split('"')[-1].split() for line in out.splitlines() if " coin " in line]
    assert status == 0 and len(rows) > 3
    for _, q, _, p, _, coin, *verdict in rows:
        if verdict != ["not", "reached"]:
            margin = float(p) - float(coin) * float(q)
            near = abs(margin) < 2e-4  # four decimals are shown
            assert near or (margin > 0) == (verdict != ["rejected"]), (q, p, coin, verdict)
    assert {tuple(row[6:]) for row in rows} >= {("rejected",), ("not", "reached")}
    assert (draft == "ngram") == all(row[1] == "1.0000" for row in rows)
    assert out.endswith("\n\n" + say(*options)[1])  # watching changes nothing


@pytest.mark.parametrize("rule", ["block", "match"])
def test_trace_of_the_other_rules_says_where_a_token_came_from(say, tmp_path, rule):
    draft = str(checkpoint(tmp_path / "draft", seed=1))
    options = ["--draft", draft, "--seed", "1", "--temperature", "0.5", "-n", "40"]
    _, out, _ = say("--trace", "--verify", rule, *options)
    rounds = [part.splitlines() for part in out.split("round ")[1:-1]]
    assert any("rejected" in line for lines in rounds for line in lines)
    for heading, *lines in rounds:
        accepted, proposed = (int(word) for word in heading.split()[1:4:2])
        verdicts = [line.split("coin")[1].split()[1:] for line in lines if " coin " in line]
        assert verdicts[:accepted] == [["accepted"]] * accepted
        corrected = accepted < proposed
        assert not corrected or verdicts[accepted] in (["rejected"], ["after", "the", "stop"])
        after = {tuple(words) for words in verdicts[accepted + 1 :]}
        assert after <= {("dropped",) if rule == "block" else ("not", "reached")}
        origin = ("p" if rule == "match" else "the residual") if corrected else "p, as the bonus"
        assert any(line.endswith(f" from {origin}") for line in lines)


def test_json_counts_are_those_of_the_trace(say, tmp_path):
    draft = checkpoint(tmp_path / "draft", seed=1)
    options = ["--draft", str(draft), "--seed", "1", "--temperature", "1", "-n", "40"]
    out = say(*options, "--trace", "--json", str(tmp_path / "out.json"))[1]
    data = json.loads((tmp_path / "out.json").read_text())
    rounds = re.findall(r"^round \d+: (\d+) of (\d+) ", out, re.M)
    accepted, proposals = (sum(map(int, column)) for column in zip(*rounds))
    assert 0 < accepted < proposals == data["proposals"]
    assert data["acceptance"] == accepted / proposals
    assert data["target_passes"] == len(rounds) > 1
    assert len(data["tokens"]) == accepted + len(re.findall(r'" +from ', out))


def test_a_stop_token_ends_the_text_and_is_not_in_it(say, target, tmp_path):
    def sampled(seed):
        options = "--temperature", "3", "-n", "150", "--seed", str(seed)
        _, out, error = say("--json", str(tmp_path / "out.json"), *options)
        return out, error, json.loads((tmp_path / "out.json").read_text())

    runs = (sampled(seed) for seed in range(30))
    out, error, data = next(run for run in runs if 299 in run[2]["tokens"])
    assert (data["ended"], data["tokens"].index(299)) == ("stop", len(data["tokens"]) - 1)
    assert "ended by stop" in error
    assert data["text"] + "\n" == out
    assert data["text"] == model.Tokenizer(target).decode(data["tokens"][:-1])


@pytest.mark.parametrize("n", [0, 1, 12])
def test_n_is_the_number_of_tokens(say, tmp_path, n):
    assert say("--json", str(tmp_path / "out.json"), "-n", str(n))[0] == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert (data["ended"], len(data["tokens"])) == ("length", n)


def test_a_full_context_ends_the_text(say, tmp_path):
    assert say("--json", str(tmp_path / "out.json"), "-n", "1000")[0] == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["ended"] == "context"
    assert data["prompt_tokens"] + len(data["tokens"]) == CONFIG["max_position_embeddings"]


class Interrupting(minispec.PromptLookup):
    def propose(self, tokens, K, law, randomness):
        if len(tokens) > 50:
            raise KeyboardInterrupt
        return super().propose(tokens, K, law, randomness)


def test_ctrl_c_ends_with_the_summary(say, tmp_path, monkeypatch):
    monkeypatch.setattr(minispec, "PromptLookup", Interrupting)
    line = "--draft", "ngram", "--json", str(tmp_path / "out.json"), "-n", "100"
    status, out, error = say(*line)
    data = json.loads((tmp_path / "out.json").read_text())
    assert (status, data["ended"], error.count("\n")) == (130, "interrupted", 1)
    assert "ended by interrupted" in error and 0 < len(data["tokens"]) < 100
    assert out == data["text"] + "\n"


SLOW_DRAFT = """
import signal, sys, time, minispec
signal.signal(signal.SIGINT, signal.default_int_handler)
class Slow(minispec.Drafter):
    def propose(self, *context):
        time.sleep(0.02)
        return [], []
minispec.DRAFTS["none"] = lambda target: Slow()
sys.exit(minispec.main(sys.argv[1:]))
"""


def test_a_real_sigint_ends_with_the_summary(target, tmp_path):
    line = [sys.executable, "-c", SLOW_DRAFT, "--target", target, "--draft", "none", "-n", "170"]
    line += ["--raw", "--json", tmp_path / "out.json", "hello"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, cwd=ROOT)
    with subprocess.Popen(list(map(str, line)), **pipes) as child:
        first = child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        rest, error = child.communicate(timeout=60)
    data = json.loads((tmp_path / "out.json").read_text())
    assert (child.returncode, data["ended"]) == (130, "interrupted"), error
    assert error.count(b"\n") == 1 and b"ended by interrupted" in error
    assert 0 < len(data["tokens"]) < 170
    assert (first + rest).decode() == data["text"] + "\n"


class SlowDraft(minispec.Drafter):
    """Always proposes id 1, after a pause."""

    def start(self, vocab, capacity, seen=None):
        self.q = minispec.point_mass(1, vocab)

    def propose(self, tokens, K, law, randomness):
        time.sleep(0.01)
        return [1] * K, [self.q] * K


def raise_interrupt(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["pass", "rule"])
def test_ctrl_c_in_the_first_round_leaves_a_whole_json(say, tmp_path, monkeypatch, place):
    monkeypatch.setitem(minispec.DRAFTS, "none", lambda target: SlowDraft())
    if place == "pass":
        monkeypatch.setattr(model.Model, "__call__", raise_interrupt)
    else:
        monkeypatch.setitem(minispec.RULES, "token", raise_interrupt)
    status, out, error = say("--draft", "none", "--json", str(tmp_path / "out.json"))
    data = json.loads((tmp_path / "out.json").read_text())
    assert (status, out, data["ended"], data["tokens"]) == (130, "\n", "interrupted", [])
    assert error.count("\n") == 1 and data["acceptance"] is None
    seconds = {name: value for name, value in data.items() if name.startswith("seconds")}
    assert min(seconds.values()) >= 0, seconds


def test_ctrl_c_while_loading_is_one_line(say, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "load", raise_interrupt)
    result = say("--json", str(tmp_path / "out.json"))
    assert result == (130, "", "minispec.py: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--trace"]])
def test_a_reader_that_is_gone_is_no_error(target, options):
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, ROOT / "minispec.py", "--target", target, "-n", "5", *options, "hi"]
    # With PYTHONUNBUFFERED the pipe breaks at the first print, without it perhaps only at the exit.
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    pipes = dict(stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered)
    done = subprocess.run(line, timeout=60, **pipes)
    os.close(writer)
    assert "Error" not in done.stderr and "Broken pipe" not in done.stderr, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("option", ["--help", "--version-of-nothing"])
def test_a_reader_that_is_gone_before_the_work_is_no_error(option):
    line = f"{sys.executable} {ROOT / 'minispec.py'} {option} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if option == "--help" else 2)
    assert not any(word in done.stderr for word in ("Traceback", "Exception", "Broken pipe"))


@pytest.mark.parametrize("closed, status", [("<&-", 2), (">&-", 0), ("2>&-", 0)])
def test_a_closed_stream_is_no_traceback(target, closed, status):
    prompt = "" if closed == "<&-" else "hi"
    line = f"{sys.executable} {ROOT / 'minispec.py'} --target {target} -n 5 {prompt} {closed}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done
    assert "Traceback" not in done.stderr, done.stderr
    if closed == "<&-":
        assert "the prompt is empty" in done.stderr


def test_a_closed_pipe_is_no_traceback(target):
    line = f"{sys.executable} {ROOT / 'minispec.py'} --target {target} -n 150 hi | head -c 3"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    assert 0 < len(done.stdout) <= 3, done
    assert not any(word in done.stderr for word in ("Traceback", "Error", "Broken pipe"))


def test_import_is_quick():
    def seconds(code):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
        return time.perf_counter() - started

    best = {code: min(seconds(code) for _ in range(3)) for code in ("pass", "import minispec")}
    assert best["import minispec"] - best["pass"] < 0.3
