"""The UNet: which skip goes where with which coefficient, its layers by formula, and every option."""

import itertools
import math

import pytest
import torch
from conftest import normal, t, watch_skips
from torch.nn import functional as F

import uvit
from unet import Attention, Downsample, ResBlock, UNet, Upsample, load_published, timestep_embedding

SMALL = dict(size=8, channels=16, channel_mult=(1, 2), blocks=1, attention=(4,), heads=2)


def small_unet(**options):
    return UNet(**{**SMALL, **options})


# ---------------------------------------------------------------------------------------------------------------------
# Long skips

@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_the_decoder_takes_kappa_to_the_i_times_skip_i(levels, blocks, randomize):
    x = normal(1, 1, 16, 16)
    for mode, by_hand in ("none", lambda i: 1), ("sqrt2", lambda i: 0.5**0.5), ("cs", lambda i: 0.6**i):
        model = randomize(UNet(16, 1, channels=4, channel_mult=(1, 2, 1, 2)[:levels], blocks=blocks, attention=(),
                               heads=1, skip_scaling=mode, kappa=0.6)).double()
        given, taken, _ = watch_skips(model, x, 0)
        assert len(given) == len(taken) == levels * (blocks + 1)                # N long skips
        for i, skip in enumerate(given):
            received = taken[len(given) - 1 - i]                                # i = 0, the outermost, comes last
            torch.testing.assert_close(received[:, -skip.shape[1]:], by_hand(i) * skip, rtol=1e-12, atol=0)


def test_only_the_skip_is_scaled_and_it_comes_after_the_running_features(randomize):
    model = randomize(small_unet(skip_scaling="cs", kappa=0.5)).double()
    given, taken, decoded = watch_skips(model, normal(1, 3, 8, 8), 0)
    for j in range(1, len(taken)):
        assert torch.equal(taken[j][:, :decoded[j - 1].shape[1]], decoded[j - 1])


@pytest.mark.parametrize("mode", ["ls", "ls-separate"])
def test_learned_scales_act_on_the_skips_with_one_coefficient_a_channel(mode, randomize):
    model = randomize(small_unet(skip_scaling=mode)).double()
    given, taken, _ = watch_skips(model, normal(2, 3, 8, 8), 0)
    assert [skip.shape[1] for skip in given] == [16, 16, 16, 32]
    assert len(model.skip_scaling.networks) == (2 if mode == "ls" else 4)
    for i, skip in enumerate(given):
        kappa = taken[-1 - i][:, -skip.shape[1]:] / skip
        expected = model.skip_scaling.networks[{"ls": (0, 0, 0, 1), "ls-separate": (0, 1, 2, 3)}[mode][i]](skip)
        assert expected.shape == (2, skip.shape[1], 1, 1)
        torch.testing.assert_close(kappa, expected.expand_as(kappa), rtol=1e-9, atol=0)


def test_a_change_of_one_skip_is_first_noticed_by_its_own_decoder_stage(randomize):
    model = randomize(UNet(8, 1, channels=8, channel_mult=(1, 1, 1), blocks=2, attention=(), heads=1)).double()
    x = normal(1, 1, 8, 8)
    _, _, decoded = watch_skips(model, x, 0)
    unscaled = model.skip_scaling.forward
    for changed in range(9):
        model.skip_scaling.forward = lambda i, skip: unscaled(i, skip) + (i == changed)
        _, _, decoded_now = watch_skips(model, x, 0)
        differs = [not torch.equal(now, before) for now, before in zip(decoded_now, decoded)]
        assert differs == [j >= 8 - changed for j in range(9)]


# ---------------------------------------------------------------------------------------------------------------------
# Layers by formula

@pytest.mark.parametrize("scale_shift", [True, False])
@pytest.mark.parametrize("resample", [None, "down", "up"])
def test_a_residual_block_by_formula(scale_shift, resample, randomize):
    block = randomize(ResBlock(64, 128, 12, 0.0, scale_shift, resample)).double()
    p, x, emb = dict(block.named_parameters()), normal(2, 64, 4, 6), normal(2, 12, seed=1)
    resize = {None: lambda h: h, "down": lambda h: h.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).mean((3, 5)),
              "up": lambda h: h.repeat_interleave(2, 2).repeat_interleave(2, 3)}[resample]

    def swish(h):
        return h / (1 + torch.exp(-h))

    def group_norm(h, name):                                                    # 32 groups
        groups = h.unflatten(1, (32, -1))
        groups = groups - groups.mean((2, 3, 4), keepdim=True)
        groups = groups / (groups.square().mean((2, 3, 4), keepdim=True) + 1e-5).sqrt()
        return groups.flatten(1, 2) * p[name + ".weight"].view(-1, 1, 1) + p[name + ".bias"].view(-1, 1, 1)

    h = F.conv2d(resize(swish(group_norm(x, "norm1"))), p["conv1.weight"], p["conv1.bias"], padding=1)
    emb = (swish(emb) @ p["embed.weight"].T + p["embed.bias"])[..., None, None]
    if scale_shift:
        h = group_norm(h, "norm2") * (1 + emb[:, :128]) + emb[:, 128:]
    else:
        h = group_norm(h + emb, "norm2")
    h = F.conv2d(swish(h), p["conv2.weight"], p["conv2.bias"], padding=1)
    h = h + F.conv2d(resize(x), p["shortcut.weight"], p["shortcut.bias"])
    torch.testing.assert_close(block(x, normal(2, 12, seed=1)), h, rtol=1e-10, atol=1e-10)


def test_attention_by_formula(randomize):
    attention, x = randomize(Attention(64, 4)).double(), normal(2, 64, 3, 5)
    assert attention.norm.num_groups == 32
    positions = attention.norm(x).flatten(2).transpose(1, 2)                    # (B, H * W, C)
    q, k, v = (positions @ attention.qkv.weight[part, :, 0, 0].T + attention.qkv.bias[part]
               for part in (slice(0, 64), slice(64, 128), slice(128, 192)))
    heads = []
    for head in (slice(16 * i, 16 * (i + 1)) for i in range(4)):
        scores = q[..., head] @ k[..., head].transpose(1, 2) / 16**0.5
        heads.append(scores.softmax(2) @ v[..., head])
    out = torch.cat(heads, 2) @ attention.out.weight[:, :, 0, 0].T + attention.out.bias
    by_hand = x + out.transpose(1, 2).view(2, 64, 3, 5)
    torch.testing.assert_close(attention(x, None), by_hand, rtol=1e-10, atol=1e-10)


def test_resampling_layers_by_formula(randomize):
    x = normal(1, 4, 6, 8)
    down, up = randomize(Downsample(4)).double(), randomize(Upsample(4)).double()
    padded = F.pad(x, (1, 1, 1, 1))
    for row, column in (0, 0), (1, 2), (2, 3):
        window = padded[0, :, 2 * row:2 * row + 3, 2 * column:2 * column + 3]
        by_hand = (down.conv.weight * window).sum((1, 2, 3)) + down.conv.bias
        torch.testing.assert_close(down(x, None)[0, :, row, column], by_hand)
    doubled = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(up(x, None), up.conv(doubled))


@pytest.mark.parametrize("embedding", [timestep_embedding, uvit.sinusoid])
@pytest.mark.parametrize("width", [2, 8, 33, 128])
def test_timestep_embedding_by_formula(embedding, width):
    timesteps = t(0, 1, 17, 500, 999)
    by_hand = torch.zeros(5, width, dtype=torch.float64)
    for row, k in itertools.product(range(5), range(width // 2)):
        angle = timesteps[row].item() * 10000 ** (-k / (width // 2))
        by_hand[row, k], by_hand[row, width // 2 + k] = math.cos(angle), math.sin(angle)
    out = embedding(timesteps, width)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), by_hand, rtol=0, atol=2e-4)        # float32 angles up to 999


# ---------------------------------------------------------------------------------------------------------------------
# Sizes and options

OPTIONS = [dict(), dict(resblock_updown=True), dict(scale_shift_norm=False), dict(num_classes=5),
           dict(skip_scaling="ls"), dict(head_channels=8), dict(num_classes=5, null_label=False),
           dict(out_channels=6), dict(attention=()), dict(in_channels=1), dict(in_channels=4, dropout=0.3)]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_fresh_model_returns_exactly_0(options):
    model = small_unet(**options)
    x, labels = normal(2, model.in_channels, 8, 8, dtype=torch.float32), t(1, 4) if "num_classes" in options else None
    out = model(x, t(3, 999), labels)
    assert out.shape == (2, options.get("out_channels", model.in_channels), 8, 8) and (out == 0).all()


def test_fresh_residual_branches_add_nothing():
    x, emb = normal(2, 64, 4, 4, dtype=torch.float32), normal(2, 12, dtype=torch.float32)
    for layer in ResBlock(64, 64, 12, 0.0, True), ResBlock(64, 64, 12, 0.0, False), Attention(64, 4):
        assert torch.equal(layer(x, emb), x)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_timestep_and_every_parameter_matter(options, randomize):
    """Once filled, no parameter is unused: each gets a gradient, and another timestep gives another picture."""
    model = randomize(small_unet(**{**options, "channels": 64})).double()       # more channels than groups of the norm
    x, labels = normal(2, model.in_channels, 8, 8), t(1, 4) if "num_classes" in options else None
    out = model(x, t(3, 500), labels)
    out.square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 1e-9, name
    assert ((model(x, t(4, 501), labels) - out).abs().amax((1, 2, 3)) > 1e-6).all()


@pytest.mark.parametrize("scale_shift_norm", [True, False])
def test_gradients_are_exact(scale_shift_norm, randomize):
    """The slope of the loss along a random direction of all parameters together, by a central difference."""
    model = small_unet(num_classes=3, skip_scaling="ls", scale_shift_norm=scale_shift_norm, channels=64)
    model, step = randomize(model).double(), 1e-6
    directions = [normal(*p.shape, seed=i) for i, p in enumerate(model.parameters())]

    def loss_after(move):
        with torch.no_grad():
            for p, direction in zip(model.parameters(), directions):
                p += move * direction
        return model(normal(2, 3, 8, 8), t(3, 500), t(0, 2)).square().mean()

    loss_after(0).backward()
    slope = sum((p.grad * direction).sum() for p, direction in zip(model.parameters(), directions))
    difference = (loss_after(step) - loss_after(-2 * step)) / (2 * step)
    assert slope.item() == pytest.approx(difference.item(), rel=1e-5)


def test_label_rows_get_gradients_only_when_used(randomize):
    model = randomize(small_unet(num_classes=3)).double()
    model(normal(3, 3, 8, 8), t(1, 2, 3), t(2, 0, 3)).square().sum().backward()
    assert (model.label.weight.grad.abs().amax(1) > 0).tolist() == [True, False, True, True]


@pytest.mark.parametrize("options", [dict(), dict(resblock_updown=True)])
def test_sizes_need_not_be_square_nor_the_one_of_the_constructor(options, randomize):
    model = randomize(small_unet(size=(4, 12), **options))
    for height, width in (4, 12), (12, 4), (4, 4), (10, 8):
        assert model(torch.zeros(1, 3, height, width), t(5)).shape == (1, 3, height, width)


def test_sizes_that_levels_do_not_divide_are_refused():
    for size in 6, (8, 6), (6, 8):
        with pytest.raises(ValueError, match="size.*6.*divisible by 4.*3 levels"):
            UNet(size, channels=8, channel_mult=(1, 1, 1), heads=1)
    model = UNet(8, channels=8, channel_mult=(1, 1, 1), blocks=1, heads=1)
    for shape in (1, 3, 8, 6), (1, 3, 6, 8), (1, 4, 8, 8):
        with pytest.raises(ValueError, match=f"B, 3, H, W.*divisible by 4.*{shape[1]}, {shape[2]}, {shape[3]}"):
            model(torch.zeros(shape), t(5))


@pytest.mark.parametrize("channels, groups", [(7, 1), (10, 2), (12, 4), (40, 4), (48, 4), (32, 32), (96, 32)])
def test_any_number_of_channels_is_fine(channels, groups, randomize):
    model = randomize(UNet(4, channels=channels, channel_mult=(1, 2), blocks=1, attention=(4,), heads=1))
    assert model.encoder[1][0].norm1.num_groups == groups
    assert model(normal(2, 3, 4, 4, dtype=torch.float32), t(3, 999)).isfinite().all()


def test_heads_that_do_not_divide_the_channels_are_refused():
    for options in dict(heads=3), dict(heads=32), dict(head_channels=3), dict(head_channels=64), dict(head_channels=12):
        with pytest.raises(ValueError, match="heads.*" + str(*options.values())):
            small_unet(**{**options, "channel_mult": (1, 1)})


def attentions(model, x):
    """(height of its feature map, heads) of every Attention, in the order of the forward pass."""
    found = []
    for module in model.modules():
        if isinstance(module, Attention):
            module.register_forward_pre_hook(lambda module, inputs: found.append((inputs[0].shape[2], module.heads)))
    with torch.no_grad():
        model(x, t(5))
    return found


@pytest.mark.parametrize("size", [(16, 16), (16, 8), (16, 32)])
def test_attention_stands_at_the_named_heights_and_in_the_middle(size):
    def heights(attention):
        model = UNet(size, 1, channels=8, channel_mult=(1, 1, 2), blocks=2, attention=attention, heads=2)
        return [height for height, _ in attentions(model, torch.zeros(1, 1, *size))]

    assert heights(()) == [4] and heights((5, 32)) == [4]
    assert heights((8,)) == [8, 8, 4, 8, 8, 8]                                  # one more block in the decoder
    assert heights((16, 4)) == [16, 16, 4, 4, 4, 4, 4, 4, 16, 16, 16]


def test_number_of_heads_follows_from_heads_or_from_channels_a_head():
    x = torch.zeros(1, 1, 8, 8)
    for head_channels, by_hand in (None, [4, 4, 4, 4, 4, 4, 4]), (8, [2, 4, 4, 4, 4, 2, 2]):
        found = attentions(UNet(8, 1, channels=16, channel_mult=(1, 2), blocks=1, attention=(8, 4), heads=4,
                                head_channels=head_channels), x)
        assert found == list(zip([8, 4, 4, 4, 4, 8, 8], by_hand))


def test_resblock_updown_resamples_inside_residual_blocks():
    plain, inside = (UNet(8, channels=8, channel_mult=(1, 1, 2), blocks=1, heads=1, resblock_updown=on)
                     for on in (False, True))
    for model, layers, blocks in (plain, 2, 0), (inside, 0, 2):
        modules = list(model.modules())
        assert sum(isinstance(module, Downsample) for module in modules) == layers
        assert sum(isinstance(module, Upsample) for module in modules) == layers
        for direction in "down", "up":
            assert sum(isinstance(module, ResBlock) and module.resample == direction for module in modules) == blocks


def test_dropout_acts_in_training_only(randomize):
    model, plain = (randomize(small_unet(dropout=rate)).double() for rate in (0.5, 0.0))
    x = normal(2, 3, 8, 8)
    torch.manual_seed(0)
    assert not torch.allclose(model(x, t(3, 9)), model(x, t(3, 9)))
    assert torch.equal(model.eval()(x, t(3, 9)), plain(x, t(3, 9)))
    assert sum(module.p == 0.5 for module in model.modules() if isinstance(module, torch.nn.Dropout)) == \
        sum(isinstance(module, ResBlock) for module in model.modules())


# ---------------------------------------------------------------------------------------------------------------------
# Labels

def test_row_k_means_no_label(randomize):
    model, x = randomize(small_unet(num_classes=3)).double(), normal(2, 3, 8, 8)
    assert model.label.weight.shape[0] == 4 and model.num_classes == 3 and model.null_label
    without = model(x, t(3, 9))
    assert torch.equal(without, model(x, t(3, 9), t(3, 3)))
    pictures = [without] + [model(x, t(3, 9), t(k, k)) for k in range(3)]
    for one, other in itertools.combinations(pictures, 2):
        assert (one - other).abs().max() > 1e-6
    mixed = model(x, t(3, 9), t(1, 3))
    torch.testing.assert_close(mixed[0], pictures[2][0])
    torch.testing.assert_close(mixed[1], without[1])


def test_labels_are_required_without_a_row_for_no_label(randomize):
    model, x = randomize(small_unet(num_classes=3, null_label=False)), torch.zeros(2, 3, 8, 8)
    assert model.label.weight.shape[0] == 3
    assert model(x, t(3, 9), t(0, 2)).shape == x.shape
    with pytest.raises(ValueError, match="needs labels"):
        model(x, t(3, 9))


def test_labels_without_classes_are_refused():
    with pytest.raises(ValueError, match="without classes"):
        small_unet()(torch.zeros(2, 3, 8, 8), t(3, 9), t(0, 0))


# ---------------------------------------------------------------------------------------------------------------------
# Memory and precision

def test_checkpointing_computes_twice_and_gives_the_same_gradients(randomize):
    gradients = []
    for checkpointing in False, True:
        model, counted = randomize(small_unet(dropout=0.2, num_classes=3, skip_scaling="ls")).double(), []
        model.checkpointing = checkpointing
        for part in *model.encoder, model.middle, *model.decoder:
            part.register_forward_pre_hook(lambda module, inputs: counted.append(module))
        torch.manual_seed(0)
        model(normal(2, 3, 8, 8), t(3, 9), t(0, 3)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        assert len(counted) == (18 if checkpointing else 9)
        counted.clear()
        model.eval()(normal(2, 3, 8, 8), t(3, 9), t(0, 3)).sum().backward()
        assert len(counted) == 9
    for plain, recomputed in zip(*gradients):
        torch.testing.assert_close(recomputed, plain, rtol=1e-12, atol=1e-12)


def test_bf16_keeps_neighbouring_timesteps_apart(randomize):
    """937 is 936 in bf16, so the sinusoids must come first and the rounding last."""
    model, timesteps = randomize(small_unet(num_classes=3)), t(936, 937, 938)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = model.embed(timesteps, None)
    model = model.bfloat16()
    out = model(normal(1, 3, 8, 8).bfloat16().expand(3, -1, -1, -1), timesteps, t(0, 1, 2))
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    for embedding in under_autocast, model.embed(timesteps, None), timestep_embedding(timesteps, 16).bfloat16():
        for one, other in itertools.combinations(embedding.float(), 2):
            assert (one - other).abs().max() > 0.02


# ---------------------------------------------------------------------------------------------------------------------
# Published weights

RELEASED = [        # ours -> the names of the released files
    ("out_norm", "out.0"), ("out_conv", "out.2"), ("time", "time_embed"), ("label", "label_emb"),
    ("encoder", "input_blocks"), ("middle", "middle_block"), ("decoder", "output_blocks"),
    ("norm1", "in_layers.0"), ("conv1", "in_layers.2"),
    ("embed", "emb_layers.1"), ("norm2", "out_layers.0"), ("conv2", "out_layers.3"), ("shortcut", "skip_connection"),
]


def released(model, legacy_heads=None):
    """The state dict of our model as it would stand in a released file."""
    state_dict = {}
    for name, value in model.state_dict().items():
        owner, leaf = name.rsplit(".", 1)
        if isinstance(model.get_submodule(owner.rsplit(".", 1)[0]), Attention) and not owner.endswith("norm"):
            value = value.squeeze(-1) if leaf == "weight" else value            # a convolution over a line
            if owner.endswith("qkv") and legacy_heads:
                width = len(value) // 3 // legacy_heads                         # of a head
                value = torch.cat([value[(part * legacy_heads + head) * width:][:width]
                                   for head in range(legacy_heads) for part in range(3)])
            owner = owner.replace(".out", ".proj_out")
        elif isinstance(model.get_submodule(owner.rsplit(".", 1)[0]), Downsample):
            owner = owner.replace(".conv", ".op")
        for ours, theirs in RELEASED:
            owner = ".".join(theirs if part == ours else part for part in owner.split("."))
        state_dict[f"{owner}.{leaf}"] = value
    return state_dict


@pytest.mark.parametrize("order", ["new", "legacy"])
@pytest.mark.parametrize("options", [dict(), dict(num_classes=3, skip_scaling="ls", resblock_updown=True)])
def test_released_names_fill_every_parameter(order, options, randomize):
    model, fresh = randomize(small_unet(**options)), small_unet(**options)
    if "skip_scaling" in options:
        fresh.skip_scaling.load_state_dict(model.skip_scaling.state_dict())     # no released file knows of it
    state_dict = {name: value for name, value in released(model, 2 if order == "legacy" else None).items()
                  if not name.startswith("skip_scaling")}
    assert "input_blocks.0.0.weight" in state_dict and "middle_block.1.proj_out.bias" in state_dict
    load_published(fresh, state_dict, order)
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name


def test_weights_that_do_not_fit_are_named(randomize):
    state_dict = released(randomize(small_unet()))
    missing = {name: value for name, value in state_dict.items() if name != "middle_block.1.norm.weight"}
    for wrong, named in [(missing, "middle.1.norm.weight"),
                         ({**state_dict, "surprise.weight": torch.zeros(1)}, "surprise.weight"),
                         ({**state_dict, "out.2.bias": torch.zeros(6)}, "out_conv.bias.*6.*3")]:
        with pytest.raises(ValueError, match="do not fit.*" + named) as refusal:
            load_published(small_unet(), wrong)
        assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="'new' or 'legacy', not 'old'"):
        load_published(small_unet(), state_dict, "old")


def test_the_lesson_prints_every_part_and_its_parameters(run_lesson):
    printed = run_lesson("unet")
    model = UNet(32, channels=32, channel_mult=(1, 2, 2), blocks=1, skip_scaling="ls")
    for part in "encoder.5", "middle", "decoder.0", "decoder.5":
        row = next(line for line in printed.splitlines() if line.startswith(part + " "))
        assert f"{sum(p.numel() for p in model.get_submodule(part).parameters()):,d}" in row
    assert f"{sum(p.numel() for p in model.parameters()):,d}" in printed and max(map(len, printed.splitlines())) <= 125


def test_a_network_whose_norms_would_take_out_the_embedding_is_refused():
    """32 channels in 32 groups: h + emb loses emb in the norm that follows. With scale-shift, or a wider level, it does not."""
    with pytest.raises(ValueError, match="scale_shift_norm"):
        UNet(8, channels=32, channel_mult=(1, 1), attention=(), scale_shift_norm=False)
    UNet(8, channels=32, channel_mult=(1, 2), attention=(), scale_shift_norm=False)
    UNet(8, channels=32, channel_mult=(1, 1), attention=())
