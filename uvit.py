"""The transformer backbones: UViT with long skips, and the plain ViT of the Min-SNR paper.

UViT   Bao et al. 2023, "All are Worth Words: A ViT Backbone for Diffusion Models" (arXiv 2209.12152): patches, the timestep
       and the label are all tokens; the first half of the blocks feeds the second through long skips, which pass through
       `SkipScaling` on their way.
ViT    Hang et al. 2023 (arXiv 2303.09556), Section 4.1: no long skips, the timestep is a row of a learned table.

    python uvit.py                 # the tokens, blocks and skips of a UViT with shapes, parameters and multiply-adds

Shapes: x (B, C, H, W)   tokens (B, L, D), L = extra tokens + (H / patch) * (W / patch)
"""

import math
import re

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scaling import SkipScaling


def sinusoid(t, width):
    """Sinusoids of a timestep, cosines first: frequencies from 1 to 1/10000.   (B,) -> (B, width) float32

    Vaswani et al. 2017, Section 3.5. Always in float32: bf16 rounds 937 to 936.
    """
    frequency = torch.exp(torch.arange(width // 2, device=t.device, dtype=torch.float32) * (-math.log(10000) / (width // 2)))
    angle = t.float()[:, None] * frequency                                      # (B, width // 2)
    return F.pad(torch.cat([angle.cos(), angle.sin()], 1), (0, width % 2))


class Attention(nn.Module):
    """Multi-head self-attention.   (B, L, D) -> (B, L, D)"""

    def __init__(self, width, heads, qkv_bias):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)                   # all q, then all k, then all v
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                                    # each (B, heads, L, D / heads)
        h = F.scaled_dot_product_attention(q, k, v)
        return self.proj(h.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Pre-norm transformer block; with `skip` it first merges a long skip into its input.   (B, L, D) -> (B, L, D)"""

    def __init__(self, width, heads, skip=False, qkv_bias=False, eps=1e-5):
        super().__init__()
        self.skip_linear = nn.Linear(2 * width, width) if skip else None
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = Attention(width, heads, qkv_bias)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x, skip=None):
        if skip is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))                  # (B, L, 2D) -> (B, L, D)
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class PatchTransformer(nn.Module):
    """What UViT and ViT share: pictures to patch tokens and back, labels, checkpointing."""

    def __init__(self, size, in_channels, out_channels, patch, width, heads, num_classes, null_label, final_conv):
        super().__init__()
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        if self.size[0] % patch or self.size[1] % patch:
            raise ValueError(f"patch {patch} must divide the size, {self.size[0]}x{self.size[1]}")
        if width % heads:
            raise ValueError(f"width {width} must be divisible by the number of heads, {heads}")
        self.in_channels, self.out_channels, self.patch = in_channels, out_channels, patch
        self.num_classes, self.null_label, self.checkpointing = num_classes, null_label, False
        self.extra_tokens = 1 if num_classes is None else 2                     # timestep and label
        self.tokens = self.extra_tokens + (self.size[0] // patch) * (self.size[1] // patch)

        self.patch_embed = nn.Conv2d(in_channels, width, patch, stride=patch)
        self.position = nn.Parameter(torch.zeros(1, self.tokens, width))
        if num_classes is not None:
            self.label = nn.Embedding(num_classes + null_label, width)
        self.to_pixels = nn.Linear(width, patch * patch * out_channels)
        self.final_conv = nn.Conv2d(out_channels, out_channels, 3, padding=1) if final_conv else nn.Identity()

    def patchify(self, x):
        """(B, C, H, W) -> (B, H/p * W/p, D)"""
        if x.shape[1:] != (self.in_channels, *self.size):
            raise ValueError(f"this model takes (B, {self.in_channels}, {self.size[0]}, {self.size[1]}), not "
                             f"{tuple(x.shape)}: its position table is tied to one size")
        return self.patch_embed(x).flatten(2).transpose(1, 2)

    def unpatchify(self, tokens):
        """(B, L, D) -> (B, C_out, H, W); within a patch the order is row, column, channel."""
        x = self.to_pixels(tokens)[:, self.extra_tokens:]                       # (B, H/p * W/p, p * p * C)
        rows, columns = self.size[0] // self.patch, self.size[1] // self.patch
        x = x.view(len(x), rows, columns, self.patch, self.patch, self.out_channels)
        x = x.permute(0, 5, 1, 3, 2, 4).reshape(len(x), self.out_channels, *self.size)
        return self.final_conv(x)

    def label_tokens(self, t, labels):
        """A list with the token of each label, (B, 1, D), or an empty one where the model has no classes."""
        if self.num_classes is None and labels is not None:
            raise ValueError("labels were given to a model without classes")
        if self.num_classes is None:
            return []
        if labels is None and not self.null_label:
            raise ValueError("this model has no row for 'no label', so it needs labels")
        return [self.label(torch.full_like(t, self.num_classes, dtype=torch.long) if labels is None else labels)[:, None]]

    def run(self, block, *inputs):
        """A block, with its activations kept for the backward pass or, when checkpointing, computed again."""
        return checkpoint(block, *inputs, use_reentrant=False) if self.checkpointing and self.training else block(*inputs)


def init_linear(module):
    """Bao et al. 2023: weights from a normal of std 0.02, cut at 2 (far beyond 3 std, so in effect not cut); zero biases."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class UViT(PatchTransformer):
    """U-shaped vision transformer.   forward(x, t, labels=None) -> (B, in_channels, H, W)

    size: pixels, an int or (height, width), divisible by patch   patch: pixels
    width: D of a token   depth: blocks, counted as 2 * (depth // 2) + 1: in, middle, out   heads: divide the width
    time_mlp: a two-layer network on the timestep's sinusoid   final_conv: a 3x3 convolution over the finished picture
    num_classes: K label rows, and with null_label one more, row K, which means "no label" and is what labels=None picks
    skip_scaling, kappa: see scaling.SkipScaling
    ValueError: sizes that do not fit together; labels missing, or given to a model without classes.
    """

    def __init__(self, size, in_channels=3, patch=2, width=512, depth=12, heads=8, time_mlp=False, final_conv=True,
                 num_classes=None, null_label=True, skip_scaling="none", kappa=0.7):
        super().__init__(size, in_channels, in_channels, patch, width, heads, num_classes, null_label, final_conv)
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)) if time_mlp \
            else nn.Identity()
        self.encoder = nn.ModuleList(Block(width, heads) for _ in range(depth // 2))
        self.middle = Block(width, heads)
        self.decoder = nn.ModuleList(Block(width, heads, skip=True) for _ in range(depth // 2))
        self.norm = nn.LayerNorm(width)
        self.apply(init_linear)
        nn.init.trunc_normal_(self.position, std=0.02)
        self.skip_scaling = SkipScaling(skip_scaling, [self.tokens] * (depth // 2), kappa)     # keeps its own init

    def forward(self, x, t, labels=None):
        time = self.time(sinusoid(t, self.width).to(self.position.dtype))[:, None]              # (B, 1, D)
        x = torch.cat([*self.label_tokens(t, labels), time, self.patchify(x)], dim=1)           # (B, L, D)
        x = x + self.position
        skips = []
        for i, block in enumerate(self.encoder):
            x = self.run(block, x)
            skips.append(self.skip_scaling(i, x))                               # the one line that knows of scaling
        x = self.run(self.middle, x)
        for block in self.decoder:
            x = self.run(block, x, skips.pop())
        return self.unpatchify(self.norm(x))


class ViT(PatchTransformer):
    """Plain vision transformer of the Min-SNR paper.   forward(x, t, labels=None) -> (B, out_channels, H, W)

    size, patch, width, num_classes, null_label: see UViT   depth: blocks   timesteps: rows of the table of times
    out_channels: None means in_channels; twice in_channels for models with learned variances, the prediction comes first
    final_norm, final_conv: off in every released model; a norm after the last block, a 3x3 convolution over the picture
    ValueError: sizes that do not fit together; labels missing, or given to a model without classes.
    """

    def __init__(self, size, in_channels=3, out_channels=None, patch=2, width=768, depth=12, heads=12, timesteps=1000,
                 num_classes=None, null_label=True, final_norm=False, final_conv=False):
        out_channels = out_channels or in_channels
        super().__init__(size, in_channels, out_channels, patch, width, heads, num_classes, null_label, final_conv)
        self.time = nn.Embedding(timesteps, width)
        self.blocks = nn.ModuleList(Block(width, heads, qkv_bias=True, eps=1e-6) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6) if final_norm else nn.Identity()
        self.apply(init_linear)
        nn.init.trunc_normal_(self.position, std=0.02)
        with torch.no_grad():                                                   # residual branches shrink with depth
            for number, block in enumerate(self.blocks, start=1):
                block.attention.proj.weight.div_(math.sqrt(2 * number))
                block.fc2.weight.div_(math.sqrt(2 * number))
            self.to_pixels.weight.mul_(0.001)

    def forward(self, x, t, labels=None):
        x = torch.cat([self.time(t)[:, None], *self.label_tokens(t, labels), self.patchify(x)], dim=1)
        x = x + self.position                                                   # (B, L, D)
        for block in self.blocks:
            x = self.run(block, x)
        return self.unpatchify(self.norm(x))


# ---------------------------------------------------------------------------------------------------------------------
# Published weights

RENAMED = (         # parts of the names in the files of U-ViT, ScaleLong and Min-SNR -> parts of the names here
    ("pos_embed", "position"), ("patch_embed.proj", "patch_embed"), ("time_embed", "time"), ("time_embedding", "time"),
    ("label_emb", "label"), ("class_embedding", "label"),
    ("in_blocks", "encoder"), ("mid_block", "middle"), ("out_blocks", "decoder"),
    ("attn", "attention"), ("mlp.fc1", "fc1"), ("mlp.fc2", "fc2"), ("se", "skip_scaling.networks"),
    ("networks.layer1", "networks.0.layer1"), ("networks.layer2", "networks.0.layer2"),     # one network for all skips
    ("layer1", "fc1"), ("layer2", "fc2"),
    ("decoder_pred", "to_pixels"), ("linear_projection", "to_pixels"), ("final_layer", "final_conv"), ("to_pixel", "final_conv"),
)


def load_published(model, state_dict):
    """Fill a UViT from a state dict as U-ViT or ScaleLong released it (LS networks included), a ViT from one of Min-SNR.

    Min-SNR's tables of times may have more rows than the model has timesteps: the first ones are the trained ones. Its
    attention has no bias on the keys, which the softmax would cancel: ours is filled with zeros.
    A learned skip scaling that the file does not know keeps its fresh weights.   ValueError: names what does not fit.
    """
    renamed = {}
    for name, value in state_dict.items():
        name = f".{name}."
        for theirs, ours in RENAMED:
            name = name.replace(f".{theirs}.", f".{ours}.")
        if isinstance(model, UViT) and "se.0.layer1.weight" in state_dict:      # they count from the innermost skip
            name = re.sub(r"networks\.(\d+)", lambda i: f"networks.{len(model.decoder) - 1 - int(i[1])}", name)
        renamed[name.strip(".")] = value
    if isinstance(model, ViT) and "time.weight" in renamed:
        renamed["time.weight"] = renamed["time.weight"][:model.time.num_embeddings]
    for owner in [name.removesuffix("q_bias") for name in renamed if name.endswith(".q_bias")]:
        if owner + "v_bias" in renamed:
            q, v = renamed.pop(owner + "q_bias"), renamed.pop(owner + "v_bias")
            renamed[owner + "qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
    if not any(name.startswith("skip_scaling.") for name in renamed):
        renamed |= {name: value for name, value in model.state_dict().items() if name.startswith("skip_scaling.")}
    try:
        model.load_state_dict(renamed)
    except RuntimeError as error:
        raise ValueError("the weights do not fit: " + " ".join(str(error).split())[:600]) from None


# ---------------------------------------------------------------------------------------------------------------------
# A lesson: python uvit.py

def main():
    from sample import lesson_parser
    from unet import print_parts

    lesson_parser("uvit.py", "The parts of a UViT: shapes, parameters, multiply-adds.").parse_args()
    print(__doc__.split("\n\n")[1], "\n")
    model = UViT(32, patch=4, width=192, depth=6, heads=4, num_classes=10, skip_scaling="ls")
    parts = [("patch_embed", model.patch_embed)]
    parts += [(f"encoder.{i}", block) for i, block in enumerate(model.encoder)] + [("middle", model.middle)]
    parts += [(f"decoder.{i}", block) for i, block in enumerate(model.decoder)]
    parts += [("to_pixels", model.to_pixels), ("final_conv", model.final_conv)]
    print_parts(model, parts, torch.randn(1, 3, 32, 32), torch.tensor([500]))
    print(f"\n{model.tokens} tokens: the label, the timestep, and 8 x 8 patches of 4 x 4 pixels. Encoder block i feeds decoder block")
    print(f"{len(model.decoder) - 1} - i. See: every block costs the same, and a decoder block a little more, for merging its skip.")


if __name__ == "__main__":
    main()
