"""Every model type of the installed transformers: computed right, or refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="needs the extra: megamoe-compile[hf]")

from model_types import (  # noqa: E402
    MAX_ERROR,
    MIN_COSINE,
    REASONS,
    Verdict,
    keys_of,
    model_types,
    page,
    verdicts,
)

TYPES = model_types()
PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "support-models.md"
TOWERS = ("vision", "audio")


@pytest.mark.parametrize("model_type", TYPES)
def test_experts_of(model_type: str) -> None:
    """Relative error is 0.061 to 0.068 wherever the experts are computed: that of FP8."""
    for verdict in verdicts(model_type):
        if verdict.result == "computed":
            assert verdict.error < MAX_ERROR, verdict
            assert verdict.error > 0.01, f"{verdict}: the model's own experts ran"
            assert verdict.cosine > MIN_COSINE, verdict
        elif verdict.result == "refused":
            assert verdict.reason in REASONS.values(), "a reason that nobody knows"
        elif verdict.result == "without experts":
            assert any(word in model_type for word in TOWERS), "a model has lost its experts"
        else:
            pytest.xfail(f"{model_type} is not built: {verdict.reason}")


def rows() -> list[Verdict]:
    return [verdict for model_type in TYPES for verdict in verdicts(model_type)]


def test_the_types_are_found() -> None:
    """In transformers 5.17 there are 63 types, in 5.25 88."""
    found = {
        result: [v for v in rows() if v.result == result]
        for result in ("computed", "refused", "not built")
    }
    assert len({verdict.model_type for kind in found.values() for verdict in kind}) >= 60
    assert len(found["computed"]) >= 48
    assert len(found["refused"]) >= 3
    assert len(found["not built"]) <= 6
    classes = {verdict.experts for verdict in found["computed"]}
    assert {"Qwen3MoeExperts", "DeepseekV3Experts", "MixtralExperts", "GptOssExperts"} <= classes


def test_the_page_is_not_stale() -> None:
    """docs/support-models.md has these types and verdicts; its digits may be of another machine."""
    text = PAGE.read_text()
    version = re.search(r"types of transformers (\S+) whose", text)
    assert version is not None
    if version[1] != transformers.__version__:
        pytest.skip(f"the page is of transformers {version[1]}, not {transformers.__version__}")
    assert keys_of(text) == keys_of(page(rows())), "run `make support-table`"


def test_the_page_is_read_back() -> None:
    made = [
        Verdict("a", "AExperts", "computed", "", 0.06, 0.998),
        Verdict("a", "A2Experts", "computed", "but not this", 0.06, 0.998),
        Verdict("b", "BExperts", "refused", "no gate"),
        Verdict("c", "", "not built", "TypeError: of this Python"),
        Verdict("c_vision", "", "without experts"),
    ]
    assert keys_of(page(made)) == {
        ("a", "AExperts", "computed", ""),
        ("a", "A2Experts", "computed", "but not this"),
        ("b", "BExperts", "refused", "no gate"),
        ("c", "-", "not built", ""),
    }
