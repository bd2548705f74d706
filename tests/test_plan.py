"""The picture of the plan, docs/plan.svg."""

import pytest


def test_the_picture_of_the_plan_shows_the_imports_as_they_are():
    pytest.importorskip("grimp", reason="import-linter is not installed")
    from docs import plan

    if plan.PICTURE.read_text() != plan.draw():
        pytest.fail("docs/plan.svg is out of date: run `python -m docs.plan`", pytrace=False)
