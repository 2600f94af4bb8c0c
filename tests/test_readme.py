"""Contract: what the README quotes is what the source says, and its commands exist."""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def squeezed(text):
    return textwrap.dedent(text).strip()


def test_the_round_is_an_excerpt_of_the_source():
    source = (ROOT / "minispec.py").read_text(encoding="utf-8")
    body = source[source.index("    while len(tokens) < end") : source.index("def autoregressive")]
    assert squeezed(BLOCKS[0]) in squeezed(body) and len(BLOCKS[0].splitlines()) >= 14


def test_the_python_example_runs(capsys):
    if not (ROOT / "weights" / "smollm2-135m-instruct" / "config.json").is_file():
        pytest.skip("the default target is not there: python weights/fetch.py")
    exec(BLOCKS[1].replace("stop=tokenizer.stop", "stop=tokenizer.stop, max_new_tokens=8"), {})
    assert len(capsys.readouterr().out) > 8


def test_every_file_that_is_named_exists():
    tree = README[README.index("## Files") : README.index("## Tests")]
    names = [line.split()[0] for line in tree.splitlines() if line.startswith("    ")]
    for name in names:
        if name != "...":
            assert list(ROOT.glob(name)) or list((ROOT / "tests").glob(f"{name}*")), name


def test_options_in_the_commands_exist():
    helps = (ROOT / "minispec.py").read_text() + (ROOT / "bench.py").read_text()
    for line in README.splitlines():
        if line.startswith("    .venv/bin/python minispec.py") or "python bench.py" in line:
            for option in re.findall(r" (--[a-z-]+)", line):
                assert option == "--help" or f'"{option}"' in helps, option
