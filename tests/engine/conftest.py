"""Networks of tests are short: teams walk them all the same."""

import pytest

from cubatch.memory import plan


@pytest.fixture(autouse=True, scope="module")
def _always_a_team():
    """Form a team of as many members as a device has threads, however short operations are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_WORTH_A_TEAM", 0.0)
        yield
