"""Captured ticks with averaged weights, several optimizers and global clipping do what ordinary ticks do."""

import pytest
import torch
from helpers.captures import assert_same, data, pair, step

from petra.optim import NAdamW


def several(parameters):
    matrices = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim <= 1]
    return [NAdamW(matrices, 0.01), torch.optim.SGD(others, 0.05, momentum=0.9, fused=True)]


@pytest.mark.parametrize("options", [{"ema": 0.9, "optimizer": several}, {"ema": 0.9, "method": "delayed"}])
def test_averages_and_several_optimizers_are_captured(options):
    trainers = pair(accumulate=1, **options)
    for x, y in data(14):
        step(trainers, x, y)
    assert_same(*trainers)
    capture = trainers[1].executor.capture
    assert (capture.ineligible_reason, capture.captured_ticks > 3) == (None, True)
    before, after = (trainer.evaluate(data(2), average=True) for trainer in trainers)
    assert before == after
    step(trainers, *data(1)[0])
    assert_same(*trainers)
