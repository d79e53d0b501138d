"""The convolutional backbone: the UNet of DDPM (Ho et al. 2020) and ADM (Dhariwal & Nichol 2021), with scaled long skips.

The encoder pushes every feature map onto a stack, the decoder pops them: the long skips, which pass through `SkipScaling`
on their way. The channels-and-levels bookkeeping is in `UNet.__init__`, the whole U in `UNet.forward`.

    python unet.py                 # the levels and skips of a UNet with shapes, parameters and multiply-adds

Shapes: x (B, C, H, W)   emb (B, 4 * channels), the embedding of timestep and label, which every residual block adds
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from scaling import SkipScaling


def timestep_embedding(t, width):
    """Sinusoids of a timestep, cosines first: frequencies from 1 to 1/10000.   (B,) -> (B, width) float32

    Vaswani et al. 2017, Section 3.5, with the details of Ho et al. 2020. Always in float32: bf16 rounds 937 to 936.
    """
    half = width // 2
    frequencies = torch.exp(-math.log(10000) / half * torch.arange(half, device=t.device, dtype=torch.float32))
    angles = t.float()[:, None] * frequencies                                   # (B, half)
    return F.pad(torch.cat([angles.cos(), angles.sin()], 1), (0, width % 2))


def zero(module):
    """Start a layer at zero, so that its residual branch starts as the identity."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def norm(channels):
    """Group norm with 32 groups; where 32 does not divide the channels, with up to 4, so that narrow groups stay statistics.

    At exactly 32 channels each is a group of its own, as in the published code, and an embedding that was added before the
    norm is taken out by it: such a level needs scale-shift to know the timestep.
    """
    return nn.GroupNorm(32 if channels % 32 == 0 else math.gcd(4, channels), channels)


class Downsample(nn.Module):
    """Half the height and width, by a convolution of stride 2."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x, emb):
        return self.conv(x)


class Upsample(nn.Module):
    """Twice the height and width: nearest neighbour, then a convolution."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x, emb):
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class ResBlock(nn.Module):
    """Two convolutions around the embedding, and a shortcut.   x: (B, C_in, H, W), emb: (B, E) -> (B, C_out, H', W')

    scale_shift: the embedding scales and shifts after the second norm (ADM), else it is added before it (DDPM).
    resample: "up" or "down" changes the size inside the block, as ADM's `resblock_updown` does.
    """

    def __init__(self, channels_in, channels_out, embedding, dropout, scale_shift, resample=None):
        super().__init__()
        self.scale_shift, self.resample = scale_shift, resample
        self.norm1 = norm(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.embed = nn.Linear(embedding, 2 * channels_out if scale_shift else channels_out)
        self.norm2 = norm(channels_out)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = zero(nn.Conv2d(channels_out, channels_out, 3, padding=1))
        self.shortcut = nn.Identity() if channels_in == channels_out else nn.Conv2d(channels_in, channels_out, 1)

    def resize(self, x):
        if self.resample == "up":
            return F.interpolate(x, scale_factor=2.0, mode="nearest")
        return F.avg_pool2d(x, 2) if self.resample == "down" else x

    def forward(self, x, emb):
        h = self.conv1(self.resize(F.silu(self.norm1(x))))
        emb = self.embed(F.silu(emb))[:, :, None, None]                         # (B, C_out or 2 C_out, 1, 1)
        if self.scale_shift:
            scale, shift = emb.chunk(2, dim=1)
            h = self.norm2(h) * (1 + scale) + shift
        else:
            h = self.norm2(h + emb)
        h = self.conv2(self.dropout(F.silu(h)))
        return self.shortcut(self.resize(x)) + h


class Attention(nn.Module):
    """Self-attention over the positions of a feature map, with a residual connection.   (B, C, H, W) -> the same"""

    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.norm = norm(channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)                         # all q, then all k, then all v
        self.out = zero(nn.Conv2d(channels, channels, 1))

    def forward(self, x, emb):
        batch, channels, height, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, 3, self.heads, channels // self.heads, height * width)
        q, k, v = qkv.transpose(3, 4).contiguous().unbind(1)                    # each (B, heads, H * W, C / heads), contiguous
        h = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(h.transpose(2, 3).reshape(batch, channels, height, width))


class Stage(nn.ModuleList):
    """Layers that are called one after another with (x, emb)."""

    def forward(self, x, emb):
        for layer in self:
            x = layer(x, emb)
        return x


class FirstConv(nn.Conv2d):
    """The first convolution, called like every other layer of the encoder."""

    def forward(self, x, emb):
        return super().forward(x)


class UNet(nn.Module):
    """Predicts x_0, eps or v from a noisy image.   forward(x, t, labels=None) -> (B, out_channels, H, W)

    size: pixels, an int or (height, width), divisible by 2 ** (levels - 1)
    out_channels: None means in_channels; twice in_channels for models with learned variances, the prediction comes first
    channels, channel_mult: width of the first level, and of each level relative to it
    blocks: residual blocks of each encoder level (one more in the decoder)
    attention: heights of the feature maps that get attention; the middle always does
    heads, head_channels: number of heads, or if head_channels is given, the channels of each
    scale_shift_norm, resblock_updown: see ResBlock
    num_classes: K label rows, and with null_label one more, row K, which means "no label" and is what labels=None picks
    skip_scaling, kappa: see scaling.SkipScaling
    ValueError: sizes that do not fit together; labels missing, or given to a model without classes.
    """

    def __init__(self, size, in_channels=3, out_channels=None, channels=128, channel_mult=(1, 2, 2, 2), blocks=2,
                 attention=(16,), heads=4, head_channels=None, dropout=0.0, scale_shift_norm=True, resblock_updown=False,
                 num_classes=None, null_label=True, skip_scaling="none", kappa=0.7):
        super().__init__()
        height, width = (size, size) if isinstance(size, int) else size
        levels, embedding = len(channel_mult), 4 * channels
        self.multiple = 2 ** (levels - 1)
        if height % self.multiple or width % self.multiple:
            raise ValueError(f"size {height}x{width} must be divisible by {self.multiple}, since {levels} levels halve it "
                             f"{levels - 1} times")
        if not scale_shift_norm and all(norm(channels * mult).num_groups == channels * mult for mult in channel_mult):
            raise ValueError(f"{channels} channels with channel_mult {tuple(channel_mult)} put each channel into a norm group of its own, "
                             f"which takes out an added embedding: use scale_shift_norm or more channels")
        self.num_classes, self.null_label, self.checkpointing = num_classes, null_label, False
        self.channels, self.in_channels = channels, in_channels

        def resblock(channels_in, channels_out, resample=None):
            return ResBlock(channels_in, channels_out, embedding, dropout, scale_shift_norm, resample)

        def attend(channels):
            head_count = channels // head_channels if head_channels else heads
            if not head_count or channels % head_count or head_channels and channels % head_channels:
                what = f"of {head_channels} channels" if head_channels else f"({heads})"
                raise ValueError(f"{channels} channels cannot be split evenly into attention heads {what}")
            return Attention(channels, head_count)

        self.time = nn.Sequential(nn.Linear(channels, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        if num_classes is not None:
            self.label = nn.Embedding(num_classes + null_label, embedding)

        now = channels * channel_mult[0]                                        # channels at this point of the U
        self.encoder, skips = nn.ModuleList([Stage([FirstConv(in_channels, now, 3, padding=1)])]), [now]
        for level, mult in enumerate(channel_mult):
            for _ in range(blocks):
                layers = [resblock(now, channels * mult)]
                now = channels * mult
                if height in attention:
                    layers.append(attend(now))
                self.encoder.append(Stage(layers))
                skips.append(now)
            if level < levels - 1:
                self.encoder.append(Stage([resblock(now, now, "down") if resblock_updown else Downsample(now)]))
                skips.append(now)
                height //= 2

        self.middle = Stage([resblock(now, now), attend(now), resblock(now, now)])
        self.skip_scaling = SkipScaling(skip_scaling, skips, kappa)

        self.decoder = nn.ModuleList()
        for level, mult in reversed(list(enumerate(channel_mult))):
            for block in range(blocks + 1):
                layers = [resblock(now + skips.pop(), channels * mult)]
                now = channels * mult
                if height in attention:
                    layers.append(attend(now))
                if level and block == blocks:
                    layers.append(resblock(now, now, "up") if resblock_updown else Upsample(now))
                    height *= 2
                self.decoder.append(Stage(layers))

        self.out_norm = norm(now)
        self.out_conv = zero(nn.Conv2d(now, out_channels or in_channels, 3, padding=1))

    def embed(self, t, labels):
        """Timestep and label, (B,) and (B,) or None -> (B, E)."""
        emb = self.time(timestep_embedding(t, self.channels).to(self.out_conv.weight.dtype))
        if self.num_classes is None and labels is not None:
            raise ValueError("labels were given to a model without classes")
        if self.num_classes is None:
            return emb
        if labels is None and not self.null_label:
            raise ValueError("this model has no row for 'no label', so it needs labels")
        return emb + self.label(torch.full_like(t, self.num_classes, dtype=torch.long) if labels is None else labels)

    def forward(self, x, t, labels=None):
        if x.shape[1] != self.in_channels or x.shape[2] % self.multiple or x.shape[3] % self.multiple:
            raise ValueError(f"this UNet takes (B, {self.in_channels}, H, W) with H and W divisible by {self.multiple}, "
                             f"not {tuple(x.shape)}")
        emb = self.embed(t, labels)
        skips = []
        for i, stage in enumerate(self.encoder):
            x = self.run(stage, x, emb)
            skips.append(self.skip_scaling(i, x))                               # the one line that knows of scaling
        x = self.run(self.middle, x, emb)
        for stage in self.decoder:
            x = self.run(stage, torch.cat([x, skips.pop()], dim=1), emb)
        return self.out_conv(F.silu(self.out_norm(x)))

    def run(self, stage, x, emb):
        """A stage, with its activations kept for the backward pass or, when checkpointing, computed again."""
        return checkpoint(stage, x, emb, use_reentrant=False) if self.checkpointing and self.training else stage(x, emb)


# ---------------------------------------------------------------------------------------------------------------------
# Published weights

RENAMED = (         # parts of the names in guided-diffusion's files -> parts of the names here, in this order
    ("time_embed", "time"), ("label_emb", "label"),
    ("input_blocks", "encoder"), ("middle_block", "middle"), ("output_blocks", "decoder"),
    ("in_layers.0", "norm1"), ("in_layers.2", "conv1"), ("emb_layers.1", "embed"),
    ("out_layers.0", "norm2"), ("out_layers.3", "conv2"), ("skip_connection", "shortcut"), ("op", "conv"),
    ("out.0", "out_norm"), ("out.2", "out_conv"), ("proj_out", "out"),
)


def load_published(model, state_dict, attention_order="new"):
    """Fill a UNet from a state dict as guided-diffusion released it (and Min-SNR's UNets, which have the same names).

    attention_order: how the file orders the rows of qkv: "new" is all q, all k, all v, as here and in the ImageNet 64x64
    model; "legacy" is q, k, v of each head in turn, as in the larger released models.
    A learned skip scaling that the file does not know keeps its fresh weights.   ValueError: names what does not fit.
    """
    if attention_order not in ("new", "legacy"):
        raise ValueError(f"attention_order must be 'new' or 'legacy', not {attention_order!r}")
    renamed = {name: value for name, value in model.state_dict().items() if name.startswith("skip_scaling.")}
    for name, value in state_dict.items():
        name = f".{name}."
        for theirs, ours in RENAMED:
            name = name.replace(f".{theirs}.", f".{ours}.")
        owner, _, leaf = name.strip(".").rpartition(".")
        if owner.endswith((".qkv", ".out")) and leaf == "weight":
            value = value.unsqueeze(-1)                                         # a convolution over a line of positions
        renamed[f"{owner}.{leaf}"] = value
    heads = {f"{name}.qkv": module.heads for name, module in model.named_modules() if isinstance(module, Attention)}
    for name, value in renamed.items() if attention_order == "legacy" else ():
        rows = 3 * heads.get(name.rpartition(".")[0], 0)
        if rows and len(value) % rows == 0:
            renamed[name] = value.unflatten(0, (rows // 3, 3, -1)).transpose(0, 1).flatten(0, 2)
    try:
        model.load_state_dict(renamed)
    except RuntimeError as error:
        raise ValueError("the weights do not fit: " + " ".join(str(error).split())[:600]) from None


# ---------------------------------------------------------------------------------------------------------------------
# A lesson: python unet.py

def print_parts(model, parts, x, t):
    """Run the model once and print a line for each (name, module): shape out, parameters, multiply-adds."""
    shapes, flops = {}, FlopCounterMode(display=False)
    for name, module in parts:
        module.register_forward_hook(lambda module, inputs, output, name=name: shapes.update({name: tuple(output.shape[1:])}))
    with flops, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):                  # the counter knows no other kernel on a CPU
        model(x, t)
    counts = {name.partition(".")[2]: sum(kinds.values()) for name, kinds in flops.get_flop_counts().items()}
    print(f"{'part':14s} {'layers':34s} {'output':>14s} {'parameters':>11s} {'multiply-adds':>14s}")
    for name, module in parts:
        layers = " ".join(type(layer).__name__ for layer in module) if isinstance(module, Stage) else type(module).__name__
        parameters = sum(p.numel() for p in module.parameters())
        print(f"{name:14s} {layers:34s} {'x'.join(map(str, shapes[name])):>14s} {parameters:11,d} {counts.get(name, 0) // 2:14,d}")
    print(f"{'the whole':14s} {'':34s} {'':14s} {sum(p.numel() for p in model.parameters()):11,d} {flops.get_total_flops() // 2:14,d}")


def main():
    from sample import lesson_parser

    lesson_parser("unet.py", "The parts of a UNet: shapes, parameters, multiply-adds.").parse_args()
    model = UNet(32, channels=32, channel_mult=(1, 2, 2), blocks=1, skip_scaling="ls")
    print(__doc__.split("\n\n")[0], "\n")
    parts = [(f"encoder.{i}", stage) for i, stage in enumerate(model.encoder)] + [("middle", model.middle)]
    parts += [(f"decoder.{i}", stage) for i, stage in enumerate(model.decoder)]
    print_parts(model, parts, torch.randn(1, 3, 32, 32), torch.tensor([500]))
    last = len(model.encoder) - 1
    print(f"\nEvery encoder part i feeds decoder part {last} - i through a long skip: the outermost carries fine detail from the")
    print("picture, the innermost the coarsest features. See: the first level is cheap in parameters and dear in multiply-adds.")


if __name__ == "__main__":
    main()
