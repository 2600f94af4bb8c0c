"""Contract: every mutant of mutants.py is killed, and one that is not would be reported."""

import mutants
import pytest


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


def test_each_fault_has_its_own_name():
    faults = [mutant.fault for mutant in mutants.MUTANTS]
    assert len(set(faults)) == len(faults)
