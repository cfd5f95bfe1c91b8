"""Dense parameters as views of one vector, so that what is done to all of them is one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_MOMENTS = ("exp_avg", "exp_avg_sq")


def flatten(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One vector that the parameters become views of."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    for parameter, part in zip(parameters, views(flat, parameters), strict=True):
        parameter.data = part
    return flat


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a vector, in the shapes of `like`."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


class FlatAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` as one kernel over the vector of all parameters.

    A step of the original costs 0.1 ms of Python however small the model is. Results are the same to the bit where
    all parameters but the last fill whole vector registers, as those of gmf and neumf do; otherwise the last bit may
    differ. State is saved and loaded by parameter, as the original has it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], **options: Any) -> None:
        super().__init__(parameters, fused=True, **options)
        self._parameters = list(parameters)
        self._keep_flat()

    def step_flat(self, flat: Tensor, gradient: Tensor) -> None:
        """One step of the vector of all parameters by its gradient."""
        group: dict[str, Any] = self.param_groups[0]
        beta1, beta2 = group["betas"]
        self._step += 1
        torch._fused_adamw_(
            [flat],
            [gradient],
            [self._moments[0]],
            [self._moments[1]],
            [],
            [self._step],
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a `torch.optim.AdamW` of the same parameters; none is that before the first step."""
        super().load_state_dict(state_dict)
        self._keep_flat()

    def _keep_flat(self) -> None:
        """Makes the moments of the parameters views of two vectors, and their step counts one tensor."""
        states = [self.state[parameter] for parameter in self._parameters]
        self._step = states[0].get("step", torch.zeros((), device=self._parameters[0].device))
        self._moments = []
        for name in _MOMENTS:
            kept = [s.get(name, torch.zeros_like(p)) for s, p in zip(states, self._parameters, strict=True)]
            self._moments.append(torch.cat([moment.reshape(-1) for moment in kept]))
            for state, part in zip(states, views(self._moments[-1], self._parameters), strict=True):
                state["step"], state[name] = self._step, part
