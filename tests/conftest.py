"""Profiles of hypothesis: "ci", the default, always tries the same examples; "random" new ones.

python -m pytest --hypothesis-profile=random
"""

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.register_profile("random", deadline=None, max_examples=1000)
settings.load_profile("ci")

# Scripts that need torch; --doctest-modules would import them.
collect_ignore = ["compare_transformers.py", "make_fixtures.py"]
