"""`FlatAdamW` is `torch.optim.AdamW` to the bit, and takes and gives its state."""

from __future__ import annotations

import copy

import torch
from torch import nn

from invdist.models.flat import FlatAdamW, flatten, views

OPTIONS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 1))


def _steps(module: nn.Module, optimizer: torch.optim.Optimizer, flat: torch.Tensor | None, seeds: range) -> None:
    parameters = list(module.parameters())
    for seed in seeds:
        torch.manual_seed(seed)
        gradient = torch.randn(sum(p.numel() for p in parameters))
        if flat is not None:
            assert isinstance(optimizer, FlatAdamW)
            optimizer.step_flat(flat, gradient)
            continue
        for parameter, part in zip(parameters, views(gradient, parameters), strict=True):
            parameter.grad = part
        optimizer.step()


def test_flat_adamw_is_adamw_to_the_bit_and_continues_its_state() -> None:
    plain, ours = _model(1), _model(1)
    reference = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
    flat = flatten(list(ours.parameters()))
    optimizer = FlatAdamW(list(ours.parameters()), **OPTIONS)
    _steps(plain, reference, None, range(5))
    _steps(ours, optimizer, flat, range(5))
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(reference.state[a]["exp_avg_sq"], optimizer.state[b]["exp_avg_sq"])
        assert reference.state[a]["step"] == optimizer.state[b]["step"] == 5

    resumed = FlatAdamW(list(ours.parameters()), **OPTIONS)
    resumed.load_state_dict(copy.deepcopy(reference.state_dict()))
    _steps(plain, reference, None, range(5, 8))
    _steps(ours, resumed, flat, range(5, 8))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))


def test_a_state_before_the_first_step_loads() -> None:
    module = _model(2)
    flat = flatten(list(module.parameters()))
    optimizer = FlatAdamW(list(module.parameters()), **OPTIONS)
    empty = torch.optim.AdamW(_model(2).parameters(), fused=True, **OPTIONS).state_dict()
    _steps(module, optimizer, flat, range(2))
    optimizer.load_state_dict(empty)
    assert all(float(state["step"]) == 0 for state in optimizer.state.values())
    assert all(not state["exp_avg"].any() for state in optimizer.state.values())
