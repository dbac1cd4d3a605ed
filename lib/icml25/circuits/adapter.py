"""Where a stock Hugging Face model writes to and reads from its residual stream."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .graph import CircuitGraph
from .pairs import PromptPairs

SUPPORTED = ("gpt_neox", "llama")


@dataclass(frozen=True)
class Block:
    """The modules of one layer that hooks are put on."""

    attn_norm: nn.Module
    mlp_norm: nn.Module
    qkv: tuple[nn.Module, ...]  # one fused projection, or three
    attn_out: nn.Module
    mlp: nn.Module


class Adapter:
    """One view of GPT-NeoX and Llama models, bare or wrapped by peft.

    Linear maps are read off by applying a module to the identity, so that low-rank
    updates, rescalings and quantised weights count as what they do.

    Args:
        model: a ``GPTNeoXForCausalLM`` or ``LlamaForCausalLM`` of transformers, or a
            ``PeftModel`` around one, in evaluation mode.

    Raises:
        NotImplementedError: another architecture, or peft's prompt-learning methods.
        TypeError: not a module.
        ValueError: the model is in training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch module, got {type(model).__name__}")
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", 0):
            raise NotImplementedError(
                "prompt-learning adapters add tokens and have no circuit here; "
                "use weight adapters such as LoRA"
            )
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        config = getattr(base, "config", None)
        kind = getattr(config, "model_type", type(base).__name__)
        if kind not in SUPPORTED or not hasattr(base, "lm_head"):
            raise NotImplementedError(
                f"no adapter for {type(base).__name__} (type {kind!r}); supported: "
                f"causal language models of types {', '.join(SUPPORTED)}, whose blocks "
                "normalise their input and add to one residual stream"
            )
        if model.training:
            raise ValueError("the model is in training mode: call model.eval() first")
        self.dtype = base.lm_head.weight.dtype
        if self.dtype == torch.float16:
            warnings.warn(
                "float16: gradients of a KL divergence underflow and small scores are "
                "lost; use bfloat16 or float32",
                stacklevel=3,
            )
        self.model, self.base, self.kind = model, base, kind
        self.num_heads = config.num_attention_heads
        self.dim = config.hidden_size
        if kind == "gpt_neox":
            self.backbone = base.gpt_neox
            self.embed = self.backbone.embed_in
            self.final_norm = self.backbone.final_layer_norm
            self.num_kv_heads = self.num_heads
            self.head_dim = self.dim // self.num_heads
            self.blocks = [
                Block(
                    layer.input_layernorm,
                    layer.post_attention_layernorm,
                    (layer.attention.query_key_value,),
                    layer.attention.dense,
                    layer.mlp,
                )
                for layer in self.backbone.layers
            ]
            is_parallel = config.use_parallel_residual
        else:
            self.backbone = base.model
            self.embed = self.backbone.embed_tokens
            self.final_norm = self.backbone.norm
            self.num_kv_heads = config.num_key_value_heads
            self.head_dim = self.backbone.layers[0].self_attn.head_dim
            self.blocks = [
                Block(
                    layer.input_layernorm,
                    layer.post_attention_layernorm,
                    tuple(getattr(layer.self_attn, f"{name}_proj") for name in "qkv"),
                    layer.self_attn.o_proj,
                    layer.mlp,
                )
                for layer in self.backbone.layers
            ]
            is_parallel = False
        self.graph = CircuitGraph(
            len(self.blocks), self.num_heads, is_parallel, self.num_kv_heads
        )

    @property
    def num_reads(self) -> int:
        """Slots of a layer's attention: ``H + 2G``."""
        return self.num_heads + 2 * self.num_kv_heads

    def logits(self, ids: Tensor, pairs: PromptPairs) -> Tensor:
        """Logits at each prompt's last real token, ``[N, vocabulary]``."""
        hidden = self.backbone(
            input_ids=ids, attention_mask=pairs.attention_mask, use_cache=False
        ).last_hidden_state
        rows = torch.arange(len(ids), device=ids.device)
        return self.base.lm_head(hidden[rows, pairs.last.to(ids.device)])

    def split_reads(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """Outputs of the q/k/v projections by slot: ``[S, B, T, head_dim]``."""
        if len(outputs) == 1:
            # (B, T, 3 H d_h), interleaved by head -> (3, H, B, T, d_h)
            shape = (*outputs[0].shape[:2], self.num_heads, 3, self.head_dim)
            reads = outputs[0].view(shape).permute(3, 2, 0, 1, 4)
            return reads.reshape(-1, *outputs[0].shape[:2], self.head_dim)
        # (B, T, H d_h) -> (H, B, T, d_h)
        parts = [out.unflatten(-1, (-1, self.head_dim)) for out in outputs]
        return torch.cat([part.permute(2, 0, 1, 3) for part in parts])

    def join_reads(self, reads: Tensor) -> tuple[Tensor, ...]:
        """The inverse of :meth:`split_reads`."""
        if len(self.blocks[0].qkv) == 1:
            # (3 H, B, T, d_h) -> (B, T, H, 3, d_h) -> (B, T, 3 H d_h)
            by_head = reads.unflatten(0, (3, self.num_heads)).permute(2, 3, 1, 0, 4)
            return (by_head.flatten(2),)
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return tuple(part.permute(1, 2, 0, 3).flatten(2) for part in reads.split(sizes))

    @torch.no_grad()
    def read_weights(self, layer: int) -> tuple[Tensor, Tensor]:
        """Effective q/k/v maps by slot, ``[S, dim, head_dim]``, and biases, float32."""
        maps = [_linear_map(module, self.dim) for module in self.blocks[layer].qkv]
        weights = self.split_reads(tuple(weight.unsqueeze(0) for weight, _ in maps))
        biases = self.split_reads(tuple(bias.view(1, 1, -1) for _, bias in maps))
        return weights.squeeze(1), biases.squeeze(1)  # [S, dim, d_h], [S, 1, d_h]

    @torch.no_grad()
    def write_affine(self, layer: int) -> tuple[Tensor, Tensor]:
        """Effective output map of each head, ``[H, head_dim, dim]``, and the bias."""
        size = self.num_heads * self.head_dim
        weight, bias = _linear_map(self.blocks[layer].attn_out, size)
        return weight.reshape(self.num_heads, self.head_dim, self.dim), bias

    def write_weights(self, layer: int) -> Tensor:
        """Effective output map of each head, ``[H, head_dim, dim]`` float32."""
        return self.write_affine(layer)[0]

    def normalise(self, norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised input without gain, and the scale that did it, float32.

        Args:
            norm: the module, a layer norm or an RMS norm.
            x: ``[..., dim]``.

        Returns:
            ``x_hat``, shaped like ``x``, and ``r = 1 / sigma``, ``[..., 1]``.
        """
        x = x.float()
        if self.kind == "gpt_neox":
            x = x - x.mean(-1, keepdim=True)
        eps = norm.eps if self.kind == "gpt_neox" else norm.variance_epsilon
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return x * scale, scale

    def gain(self, norm: nn.Module, maps: Tensor) -> Tensor:
        """Fold a norm's gain and, for layer norms, its centring into what follows it.

        Args:
            norm: the module.
            maps: ``[..., dim, n]`` acting on the norm's output.

        Returns:
            ``[..., dim, n]`` acting on ``x_hat``; orthogonal to the constant vector
            where the norm subtracts the mean.
        """
        maps = norm.weight.float().unsqueeze(-1) * maps
        if self.kind == "gpt_neox":
            maps = maps - maps.mean(-2, keepdim=True)
        return maps

    def norm_bias(self, norm: nn.Module) -> Tensor | None:
        """The norm's bias, ``[dim]``, if it has one."""
        return getattr(norm, "bias", None)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No parameter asks for a gradient inside."""
        asking = [p for p in self.model.parameters() if p.requires_grad]
        for p in asking:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in asking:
                p.requires_grad_(True)


@contextmanager
def hooks(
    *, before: dict[nn.Module, Callable] | None = None, after: dict | None = None
) -> Iterator[None]:
    """Hooks on modules while inside.

    Args:
        before: by module, a function of its first input; what it returns (unless
            ``None``) is used instead.
        after: by module, a function of its output, likewise.
    """
    with ExitStack() as stack:
        for module, function in (before or {}).items():
            hook = _pre_hook(function)
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        for module, function in (after or {}).items():
            handle = module.register_forward_hook(_post_hook(function))
            stack.callback(handle.remove)
        yield


def _pre_hook(function: Callable) -> Callable:
    def hook(module, args, kwargs):
        changed = function(args[0])
        return None if changed is None else ((changed, *args[1:]), kwargs)

    return hook


def _post_hook(function: Callable) -> Callable:
    def hook(module, args, output):
        return function(output)

    return hook


def _linear_map(module: nn.Module, size: int) -> tuple[Tensor, Tensor]:
    """Matrix ``[in, out]`` and bias ``[out]`` of an affine module, in float32."""
    if type(module) is nn.Linear:
        weight = module.weight.float().t()
        bias = module.bias
        return weight, weight.new_zeros(
            weight.shape[1]
        ) if bias is None else bias.float()
    some = next(p for p in module.parameters() if p.is_floating_point())
    basis = torch.eye(size, device=some.device, dtype=some.dtype).unsqueeze(0)
    bias = module(torch.zeros_like(basis[:, :1]))
    return (module(basis) - bias).squeeze(0).float(), bias.flatten().float()
