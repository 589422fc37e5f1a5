"""The whole model with its experts' weights quantized and dequantized, and tokens rounded if the scheme quantizes them.

It is the reference for expert parallelism in a scheme: nothing is sent, packed or laid out here.
Letters: T tokens, K top-k, E experts, H hidden.
"""

import functools

import torch
from torch.nn.functional import linear

from ep_moe.app.session import Model, load_whole
from ep_moe.app.start import open_model
from ep_moe.config import ActivationConfig, EngineConfig
from ep_moe.engines.transformers import loading
from ep_moe.experts import apply_activation
from ep_moe.group import EPGroup
from ep_moe.placement import Placement
from ep_moe.quant import dequantize, dequantize_weight, quantize, round_trip
from ep_moe.weights import ExpertWeights


def load_rounded(group: EPGroup, engine: EngineConfig) -> Model:
    """Load the whole model with experts in the engine's scheme, or in the checkpoint's own if that is "auto". Local."""
    model, checkpoint = load_whole(group, engine), open_model(engine)
    everything = Placement.linear(checkpoint.config.num_experts, 1)
    for name, layer in loading.layers_of(model, checkpoint).items():
        weights = ExpertWeights.from_pretrained(
            checkpoint,
            everything,
            0,
            layers=[layer],
            dtype=model.dtype,
            scheme=None if engine.scheme == "auto" else engine.scheme,
            device=group.device,
        )[layer]
        if weights.scheme.weight.quantized:
            real = (dequantize_weight(weights.w13, weights.scheme), dequantize_weight(weights.w2, weights.scheme))
            module = model.get_submodule(name)
            module.forward = functools.partial(_forward, weights, real, checkpoint.config.activation)
    return model


def _forward(
    weights: ExpertWeights,
    real: tuple[torch.Tensor, torch.Tensor],
    activation: ActivationConfig,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The forward of a transformers experts module, one expert after the other, in float32; `real`: w13, w2."""
    scheme, dtype = weights.scheme, hidden_states.dtype
    shape, hidden_states = hidden_states.shape, hidden_states.reshape(-1, hidden_states.shape[-1])
    x = hidden_states.float()
    if scheme.payload.quantized:
        x = dequantize(quantize(hidden_states, scheme, static_scale=weights.w13_input_scale))
    out = torch.zeros_like(x)
    for expert in top_k_index.unique().tolist():
        tokens, choice = torch.where(top_k_index == expert)
        biases = [None if bias is None else bias[expert].float() for bias in (weights.w13_bias, weights.w2_bias)]
        rows = x[tokens] if weights.w13_order is None else x[tokens][:, weights.w13_order[expert]]
        inner = apply_activation(linear(rows, real[0][expert], biases[0]), activation)
        if scheme.activation.quantized:
            static = None if weights.w2_input_scale is None else weights.w2_input_scale[expert]
            inner = round_trip(inner, scheme, static_scale=static)
        else:
            inner = inner.to(dtype).float()
        y = linear(inner, real[1][expert], biases[1]).to(dtype).float()
        out.index_add_(0, tokens, y * top_k_weights[tokens, choice, None].float())
    return out.to(dtype).reshape(shape)
