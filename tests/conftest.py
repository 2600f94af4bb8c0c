"""Profiles of hypothesis: "ci", the default, always tries the same examples; "random" new ones.

python -m pytest --hypothesis-profile=random
"""

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.register_profile("random", deadline=None, max_examples=1000)
settings.load_profile("ci")
