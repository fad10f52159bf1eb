"""Files of prompts, and the interval of a mean over them."""

import pytest
import torch

from icebear.concepts.attribution.cases import Case, read_cases
from icebear.concepts.stages.explained_task import bootstrap_interval
from icebear.errors import InputError


def test_the_interval_is_that_of_a_bootstrap():
    """Of the mean of 200 normal numbers: 1.96 standard errors to either side."""
    for values in torch.randn(3, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64):
        low, high = bootstrap_interval(values.tolist(), 0)
        error = 1.96 * values.std().item() / 200**0.5
        assert low == pytest.approx(values.mean().item() - error, abs=0.15 * error)
        assert high == pytest.approx(values.mean().item() + error, abs=0.15 * error)


def test_a_file_of_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Rome is", "target": " A"}\n\n{"prompt": "Paris is", "contrast": " are"}\n')
    assert read_cases(path) == [Case("Rome is", " A"), Case("Paris is", None, " are")]
    for content, message in (
        ("", "prompt"),
        ('{"prompt": "a"}\n{"text": "b"}', "Line 2"),
        ("[", "Line 1"),
    ):
        path.write_text(content)
        with pytest.raises(InputError, match=message):
            read_cases(path)
    with pytest.raises(InputError):
        read_cases(tmp_path / "none.jsonl")
