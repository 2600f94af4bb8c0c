"""Contract: every mutant of mutants.py is killed, and one that is not would be reported."""

import signal

import mutants
import pytest
from test_oracles import FOLDER, distance, read_oracle

import model


def check_logits_of_hugging_face():
    # A killer: the order of heads is consistent with itself, so only an oracle can see it.
    tokens, rows, expected = read_oracle("llama_gqa")
    m = model.load(FOLDER / "llama_gqa", model.numpy_backend("float64"))
    logits = m(tokens, m.new_cache(len(tokens)), rows=len(tokens))
    assert distance(logits[rows], expected) < 1e-9


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.fault)
def test_killed(mutant):
    assert mutants.verdict(mutant) == "killed"


def test_a_survivor_is_reported(capsys):
    harmless = mutants.Mutant("harmless", "u * b < a", "a > u * b", mutants.FIXTURE_F)
    assert mutants.table([mutants.MUTANTS[0], harmless]) == 1
    killed, survived, total = capsys.readouterr().out.splitlines()
    assert killed.startswith("killed    residual := p")
    assert survived.startswith("SURVIVED  harmless")
    assert total == "2 mutants, 1 survived"


@pytest.mark.parametrize("old", ["p[i]", "no such text"])
def test_an_edit_must_match_exactly_once(old):
    with pytest.raises(LookupError, match="not once"):
        mutants.verdict(mutants.Mutant("unclear", old, "", mutants.FIXTURE_F))


def test_a_mutant_that_does_not_run_is_no_kill():
    typo = mutants.Mutant("typo", "u * b < a", "u * b < aa", mutants.SMALL_SAMPLE)
    with pytest.raises(NameError):
        mutants.verdict(typo)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no such signal on Windows")
def test_a_mutant_without_end_is_stopped(monkeypatch):
    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(mutants, "TIME_LIMIT", 0.2)
    endless = mutants.Mutant("endless", "u = self.coin()", "while True: 0", mutants.SMALL_SAMPLE)
    assert isinstance(mutants.run(endless, mutants.edited(endless)), TimeoutError)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_the_real_modules_are_back_afterwards():
    import test_cache
    import test_exact

    import minispec

    assert test_exact.minispec is test_cache.minispec is minispec
    assert test_cache.model is model


def test_each_fault_has_its_own_name():
    faults = [mutant.fault for mutant in mutants.MUTANTS]
    assert len(set(faults)) == len(faults)
