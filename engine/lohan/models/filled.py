"""A model with all its weights on one device, for using it as it is: read one tensor at a time, from safetensors alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lohan.models.load import empty_model
from lohan.models.weights import WeightSource


def filled_model(config: Any, source: WeightSource, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build the causal language model of `config` with the weights of `source`, in evaluation mode and without gradients.

    Host memory holds one parameter at a time besides what lies on `device`.

    Args:
        config: a transformers configuration.
        dtype: of the weights on the device.

    Raises:
        ModelError: the model cannot be built, or the source's tensors are not its.
    """
    model = empty_model(config, dtype=dtype)
    source.check(model)
    filled: dict[int, nn.Parameter] = {}
    by_name = dict(model.named_parameters())
    for name, parameter in by_name.items():
        value = source.read(name).to(device=device, dtype=dtype, copy=True)
        filled[id(parameter)] = nn.Parameter(value, requires_grad=False)
    buffers = dict(model.named_buffers())
    for name in set(source.names) & buffers.keys():
        buffers[name].copy_(source.read(name))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            module.register_parameter(name, filled[id(parameter)])
    return model.to(device=device).eval()  # the buffers
