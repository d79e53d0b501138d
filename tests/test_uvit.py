"""The transformers: which skip goes where with which coefficient, tokens, layers by formula, every option."""

import itertools

import pytest
import torch
from conftest import normal, t, watch_skips

from unet import timestep_embedding
from uvit import Block, UViT, ViT, load_published, sinusoid

SMALL = dict(size=8, patch=2, width=32, depth=4, heads=4)
BACKBONES = UViT, ViT


def small(backbone, **options):
    return backbone(**{**SMALL, **options})


# ---------------------------------------------------------------------------------------------------------------------
# Long skips

@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 6, 7])
def test_the_decoder_takes_kappa_to_the_i_times_skip_i(depth, randomize):
    for mode, by_hand in ("none", lambda i: 1), ("sqrt2", lambda i: 0.5**0.5), ("cs", lambda i: 0.6**i):
        model = randomize(small(UViT, depth=depth, skip_scaling=mode, kappa=0.6)).double()
        given, taken, _ = watch_skips(model, normal(1, 3, 8, 8), 1)
        assert len(given) == len(taken) == depth // 2                           # N long skips: in, middle, out
        for i, skip in enumerate(given):
            torch.testing.assert_close(taken[-1 - i], by_hand(i) * skip, rtol=1e-12, atol=0)


@pytest.mark.parametrize("depth", [2, 5, 6])
@pytest.mark.parametrize("mode", ["ls", "ls-separate"])
def test_learned_scales_act_on_the_skips_with_one_coefficient_a_token(depth, mode, randomize):
    model = randomize(small(UViT, depth=depth, num_classes=3, skip_scaling=mode)).double()
    given, taken, _ = watch_skips(model, normal(2, 3, 8, 8), 1)
    assert len(model.skip_scaling.networks) == (1 if mode == "ls" else depth // 2)
    for i, skip in enumerate(given):
        kappa = taken[-1 - i] / skip
        expected = model.skip_scaling.networks[0 if mode == "ls" else i](skip)
        assert expected.shape == (2, 2 + 16, 1)                                 # label, timestep and patches
        torch.testing.assert_close(kappa, expected.expand_as(kappa), rtol=1e-9, atol=0)


@pytest.mark.parametrize("depth", [2, 5, 6])
def test_a_change_of_one_skip_is_first_noticed_by_its_own_decoder_block(depth, randomize):
    model, x, n = randomize(small(UViT, depth=depth)).double(), normal(1, 3, 8, 8), depth // 2
    _, _, decoded = watch_skips(model, x, 1)
    unscaled = model.skip_scaling.forward
    for changed in range(n):
        model.skip_scaling.forward = lambda i, skip: unscaled(i, skip) + (i == changed)
        _, _, decoded_now = watch_skips(model, x, 1)
        differs = [not torch.equal(now, before) for now, before in zip(decoded_now, decoded)]
        assert differs == [j >= n - 1 - changed for j in range(n)]


# ---------------------------------------------------------------------------------------------------------------------
# Blocks and tokens by formula

@pytest.mark.parametrize("options", [dict(), dict(skip=True), dict(qkv_bias=True, eps=1e-6)])
def test_a_block_by_formula(options, randomize):
    block = randomize(Block(32, 4, **options)).double()
    p, x, skip = dict(block.named_parameters()), 0.01 * normal(2, 7, 32), 0.01 * normal(2, 7, 32, seed=1)
    assert ("attention.qkv.bias" in p) == ("qkv_bias" in options)

    def layer_norm(h, name):
        h = h - h.mean(2, keepdim=True)
        h = h / (h.square().mean(2, keepdim=True) + options.get("eps", 1e-5)).sqrt()
        return h * p[name + ".weight"] + p[name + ".bias"]

    h = x
    if "skip" in options:
        h = x @ p["skip_linear.weight"][:, :32].T + skip @ p["skip_linear.weight"][:, 32:].T + p["skip_linear.bias"]
    qkv = layer_norm(h, "norm1") @ p["attention.qkv.weight"].T + p.get("attention.qkv.bias", 0)
    heads = []
    for start in range(0, 32, 8):                                               # 4 heads of 8
        q, k, v = (qkv[..., 32 * part + start:32 * part + start + 8] for part in range(3))
        heads.append((q @ k.transpose(1, 2) / 8**0.5).softmax(2) @ v)
    h = h + torch.cat(heads, 2) @ p["attention.proj.weight"].T + p["attention.proj.bias"]
    hidden = layer_norm(h, "norm2") @ p["fc1.weight"].T + p["fc1.bias"]
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2                      # exact GELU, not the tanh curve
    h = h + hidden @ p["fc2.weight"].T + p["fc2.bias"]
    torch.testing.assert_close(block(x, skip if "skip" in options else None), h, rtol=1e-10, atol=1e-12)


def first_tokens(model, x, timesteps, labels):
    """What the first block takes."""
    seen = []
    first = model.encoder[0] if isinstance(model, UViT) else model.blocks[0]
    hook = first.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(x, timesteps, labels)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("classes", [None, 3])
def test_tokens_are_label_and_timestep_and_patches_plus_a_position_each(backbone, classes, randomize):
    model, x = randomize(small(backbone, size=(4, 6), num_classes=classes)).double(), normal(2, 3, 4, 6)
    timesteps, labels = t(7, 999), None if classes is None else t(2, 1)
    time = sinusoid(timesteps, 32).double() if backbone is UViT else model.time.weight[timesteps]
    extra = [] if classes is None else [model.label.weight[labels]]
    extra = [*extra, time] if backbone is UViT else [time, *extra]              # UViT: label first; ViT: timestep first
    kernel, bias = model.patch_embed.weight, model.patch_embed.bias
    patches = [(kernel * x[:, None, :, row:row + 2, column:column + 2]).sum((2, 3, 4)) + bias
               for row in (0, 2) for column in (0, 2, 4)]
    tokens = torch.stack([*extra, *patches], 1) + model.position
    assert model.tokens == tokens.shape[1] == len(extra) + 6 and model.position.shape == (1, len(extra) + 6, 32)
    torch.testing.assert_close(first_tokens(model, x, timesteps, labels), tokens, rtol=1e-10, atol=1e-10)


def test_time_mlp_acts_on_the_sinusoid(randomize):
    model = randomize(small(UViT, time_mlp=True)).double()
    assert [p.shape for p in model.time.parameters()] == [(128, 32), (128,), (32, 128), (32,)]
    h = sinusoid(t(7), 32).double() @ model.time[0].weight.T + model.time[0].bias
    h = h * h.sigmoid() @ model.time[2].weight.T + model.time[2].bias
    torch.testing.assert_close(first_tokens(model, normal(1, 3, 8, 8), t(7), None)[:, 0], h + model.position[:, 0])


@pytest.mark.parametrize("width", [2, 8, 33, 512])
def test_the_two_copies_of_the_sinusoid_agree(width):
    timesteps = torch.arange(0, 1000, 37)
    torch.testing.assert_close(sinusoid(timesteps, width), timestep_embedding(timesteps, width), rtol=0, atol=4e-4)


@pytest.mark.parametrize("size, patch, channels", [((8, 8), 2, 3), ((4, 12), 4, 1), ((12, 6), 3, 4), ((3, 5), 1, 3)])
def test_unpatchify_undoes_patchify(size, patch, channels):
    """With embeddings that only copy the pixels of a patch, in the order row, column, channel."""
    width = patch * patch * channels
    model = ViT(size, channels, patch=patch, width=width, depth=0, heads=1).double()
    with torch.no_grad():
        model.patch_embed.weight.zero_()
        for row, column, channel in itertools.product(range(patch), range(patch), range(channels)):
            model.patch_embed.weight[(row * patch + column) * channels + channel, channel, row, column] = 1
        model.patch_embed.bias.zero_()
        model.to_pixels.weight.copy_(torch.eye(width))
        x = normal(2, channels, *size)
        tokens = model.patchify(x)
        assert tokens.shape == (2, size[0] // patch * (size[1] // patch), width)
        assert torch.equal(model.unpatchify(torch.cat([normal(2, 1, width), tokens], 1)), x)


def test_the_final_convolution_goes_over_the_finished_picture(randomize):
    model, seen = randomize(small(UViT)).double(), []
    model.final_conv.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    out = model(normal(2, 3, 8, 8), t(3, 9))
    (picture, convolved), = seen
    assert picture.shape == (2, 3, 8, 8) and model.final_conv.weight.shape == (3, 3, 3, 3)
    assert torch.equal(out, convolved)
    without = small(UViT, final_conv=False).double()
    without.load_state_dict({name: value for name, value in model.state_dict().items() if "final_conv" not in name})
    assert torch.equal(without(normal(2, 3, 8, 8), t(3, 9)), picture)


# ---------------------------------------------------------------------------------------------------------------------
# Sizes and options

OPTIONS = [(UViT, {}), (UViT, dict(time_mlp=True)), (UViT, dict(final_conv=False)),
           (UViT, dict(skip_scaling="ls", size=16)),
           (UViT, dict(num_classes=5, skip_scaling="ls-separate", depth=5, size=16)),
           (UViT, dict(num_classes=5, null_label=False)), (UViT, dict(in_channels=4, patch=4, size=(4, 12))),
           (ViT, {}), (ViT, dict(num_classes=5)), (ViT, dict(out_channels=6)),
           (ViT, dict(num_classes=5, null_label=False, in_channels=1)), (ViT, dict(final_norm=True, final_conv=True))]


@pytest.mark.parametrize("backbone, options", OPTIONS)
def test_the_timestep_and_every_parameter_matter(backbone, options, randomize):
    """Once filled, no parameter is unused: each gets a gradient, and another timestep gives another picture."""
    model = randomize(small(backbone, **options)).double()
    x, labels = normal(2, model.in_channels, *model.size), t(1, 4) if "num_classes" in options else None
    out = model(x, t(3, 500), labels)
    assert out.shape == (2, options.get("out_channels", model.in_channels), *model.size)
    out.square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 1e-9, name
    assert ((model(x, t(4, 501), labels) - out).abs().amax((1, 2, 3)) > 1e-6).all()


@pytest.mark.parametrize("backbone, options", [(UViT, dict(skip_scaling="ls", time_mlp=True)), (ViT, {})])
def test_gradients_are_exact(backbone, options, randomize):
    """The slope of the loss along a random direction of all parameters together, by a central difference."""
    model, step = randomize(small(backbone, num_classes=3, **options)).double(), 1e-6
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


@pytest.mark.parametrize("backbone", BACKBONES)
def test_sizes_that_do_not_fit_are_refused(backbone):
    for size in 32, (32, 30), (30, 32):
        with pytest.raises(ValueError, match="patch 5 must divide the size.*32"):
            backbone(size, patch=5, width=32, depth=2, heads=4)
    with pytest.raises(ValueError, match="width 32.*heads, 5"):
        backbone(8, patch=2, width=32, depth=2, heads=5)
    model = small(backbone)
    for shape in (1, 3, 16, 16), (1, 3, 4, 16), (1, 3, 7, 7), (1, 4, 8, 8):
        with pytest.raises(ValueError, match=f"B, 3, 8, 8.*not .1, {shape[1]}, {shape[2]}, {shape[3]}.*position"):
            model(torch.zeros(shape), t(5))


def test_depth_counts_two_halves_and_a_middle():
    for depth, half in (1, 0), (2, 1), (3, 1), (12, 6), (13, 6):
        model = small(UViT, depth=depth)
        assert (len(model.encoder), len(model.decoder)) == (half, half)
        assert sum(isinstance(module, Block) for module in model.modules()) == 2 * half + 1
        assert len(small(ViT, depth=depth).blocks) == depth


# ---------------------------------------------------------------------------------------------------------------------
# Initialisation

def test_uvit_starts_from_small_normals_and_its_learned_scales_near_one_half():
    torch.manual_seed(0)
    model = UViT(16, patch=2, width=128, depth=4, heads=4, skip_scaling="ls")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.startswith("skip_scaling"):
            assert abs(module.weight.std().item() - 0.02) < 0.002 and abs(module.weight.mean().item()) < 0.002, name
            assert module.bias is None or (module.bias == 0).all(), name
    assert abs(model.position.std().item() - 0.02) < 0.002
    network = model.skip_scaling.networks[0]                                    # PyTorch's own, uniform
    for layer in network.fc1, network.fc2:
        bound = layer.in_features**-0.5
        assert 0.9 * bound < layer.weight.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.2)
        assert layer.bias.abs().max() > 0
    kappa = network(normal(4, 65, 128, dtype=torch.float32))
    assert abs(kappa.mean().item() - 0.5) < 0.1


def test_vit_starts_with_branches_that_shrink_with_depth_and_pixels_near_0():
    torch.manual_seed(0)
    model = ViT(16, patch=2, width=128, depth=6, heads=4)
    for number, block in enumerate(model.blocks, start=1):
        for layer, std in [(block.attention.proj, 0.02 / (2 * number) ** 0.5), (block.fc2, 0.02 / (2 * number) ** 0.5),
                           (block.attention.qkv, 0.02), (block.fc1, 0.02)]:
            assert layer.weight.std().item() == pytest.approx(std, rel=0.05) and (layer.bias == 0).all()
        assert block.norm1.eps == block.norm2.eps == 1e-6
    assert model.to_pixels.weight.std().item() == pytest.approx(2e-5, rel=0.1) and (model.to_pixels.bias == 0).all()
    assert model.position.std().item() == pytest.approx(0.02, rel=0.1)
    assert model(normal(1, 3, 16, 16, dtype=torch.float32), t(5)).abs().max() < 0.01


def test_vit_looks_its_timesteps_up_in_a_table(randomize):
    model, x = randomize(small(ViT, timesteps=50)).double(), normal(3, 3, 8, 8)
    assert model.time.weight.shape == (50, 32)
    before = model(x, t(0, 48, 49))
    with torch.no_grad():
        model.time.weight[48] += 1
    after = model(x, t(0, 48, 49))
    assert [torch.equal(one, other) for one, other in zip(before, after)] == [True, False, True]
    with pytest.raises(IndexError):
        model(x, t(0, 48, 50))


# ---------------------------------------------------------------------------------------------------------------------
# Labels

@pytest.mark.parametrize("backbone", BACKBONES)
def test_row_k_means_no_label(backbone, randomize):
    model, x = randomize(small(backbone, num_classes=3)).double(), normal(2, 3, 8, 8)
    assert model.label.weight.shape[0] == 4 and model.num_classes == 3 and model.null_label
    without = model(x, t(3, 9))
    assert torch.equal(without, model(x, t(3, 9), t(3, 3)))
    pictures = [without] + [model(x, t(3, 9), t(k, k)) for k in range(3)]
    for one, other in itertools.combinations(pictures, 2):
        assert (one - other).abs().max() > 1e-6
    mixed = model(x, t(3, 9), t(1, 3))
    torch.testing.assert_close(mixed[0], pictures[2][0])
    torch.testing.assert_close(mixed[1], without[1])


@pytest.mark.parametrize("backbone", BACKBONES)
def test_labels_are_required_without_a_row_for_no_label_and_refused_without_classes(backbone):
    x = torch.zeros(2, 3, 8, 8)
    model = small(backbone, num_classes=3, null_label=False)
    assert model.label.weight.shape[0] == 3
    assert model(x, t(3, 9), t(0, 2)).shape == x.shape
    with pytest.raises(ValueError, match="needs labels"):
        model(x, t(3, 9))
    with pytest.raises(ValueError, match="without classes"):
        small(backbone)(x, t(3, 9), t(0, 0))


# ---------------------------------------------------------------------------------------------------------------------
# Memory and precision

@pytest.mark.parametrize("backbone, blocks", [(UViT, 5), (ViT, 4)])
def test_checkpointing_computes_twice_and_gives_the_same_gradients(backbone, blocks, randomize):
    gradients = []
    for checkpointing in False, True:
        model, counted = randomize(small(backbone, num_classes=3)).double(), []
        model.checkpointing = checkpointing
        for module in model.modules():
            if isinstance(module, Block):
                module.register_forward_pre_hook(lambda module, inputs: counted.append(module))
        model(normal(2, 3, 8, 8), t(3, 9), t(0, 3)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        assert len(counted) == (2 * blocks if checkpointing else blocks)
        counted.clear()
        model.eval()(normal(2, 3, 8, 8), t(3, 9), t(0, 3)).sum().backward()
        assert len(counted) == blocks
    for plain, recomputed in zip(*gradients):
        torch.testing.assert_close(recomputed, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backbone, options", [(UViT, dict(skip_scaling="ls")), (UViT, dict(time_mlp=True)), (ViT, {})])
def test_bf16_keeps_neighbouring_timesteps_apart(backbone, options, randomize):
    """937 is 936 in bf16, so the sinusoids must come first and the rounding last."""
    model, timesteps = randomize(small(backbone, num_classes=3, **options)), t(936, 937, 938)
    x, labels = normal(1, 3, 8, 8, dtype=torch.float32).expand(3, -1, -1, -1), t(0, 1, 2)
    time_token = 1 if backbone is UViT else 0
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        under_autocast = first_tokens(model, x, timesteps, labels)[:, time_token]
    model = model.bfloat16()
    out = model(x.bfloat16(), timesteps, labels)
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    for embedding in under_autocast, first_tokens(model, x.bfloat16(), timesteps, labels)[:, time_token]:
        for one, other in itertools.combinations(embedding.float(), 2):
            assert (one - other).abs().max() > 0.02


# ---------------------------------------------------------------------------------------------------------------------
# Published weights

IN_BOTH = [("position", "pos_embed"), ("patch_embed", "patch_embed.proj"), ("attention", "attn"), ("fc1", "mlp.fc1"),
           ("fc2", "mlp.fc2")]
RELEASED = {        # ours -> the names of the released files
    UViT: [*IN_BOTH, ("time", "time_embed"), ("label", "label_emb"), ("encoder", "in_blocks"), ("middle", "mid_block"),
           ("decoder", "out_blocks"), ("to_pixels", "decoder_pred"), ("final_conv", "final_layer")],
    ViT: [*IN_BOTH, ("time", "time_embedding"), ("label", "class_embedding"), ("to_pixels", "linear_projection"),
          ("final_conv", "to_pixel")],
}


def released(model):
    """The state dict of our model as it would stand in a released file, scales of skips aside."""
    state_dict = {}
    for name, value in model.state_dict().items():
        if not name.startswith("skip_scaling."):
            for ours, theirs in RELEASED[type(model)]:
                name = ".".join(theirs if part == ours else part for part in name.split("."))
            if name.endswith("attn.qkv.bias"):                                  # on k the softmax cancels it
                q, _, v = value.chunk(3)
                state_dict |= {name.replace("qkv.bias", "q_bias"): q, name.replace("qkv.bias", "v_bias"): v}
            else:
                state_dict[name] = value
    return state_dict


def assert_same_function(model, other):
    x, labels = normal(2, 3, 8, 8, dtype=torch.float32), None if model.num_classes is None else t(1, 3)
    torch.testing.assert_close(other(x, t(3, 999), labels), model(x, t(3, 999), labels), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backbone, options", [(UViT, {}), (UViT, dict(num_classes=3, time_mlp=True)), (ViT, {}),
                                               (ViT, dict(num_classes=3, final_norm=True, final_conv=True))])
def test_released_names_fill_every_parameter(backbone, options, randomize):
    model, fresh = randomize(small(backbone, **options)), small(backbone, **options)
    load_published(fresh, released(model))
    assert_same_function(model, fresh)


@pytest.mark.parametrize("mode", ["ls", "ls-separate"])
def test_released_learned_scales_count_from_the_innermost_skip(mode, randomize):
    """ScaleLong names them se.layer1 when shared, se.0.layer1 ... when not; se.0 serves the first decoder block."""
    model, fresh = (small(UViT, depth=6, skip_scaling=mode) for _ in range(2))
    state_dict = released(randomize(model))
    for i, network in enumerate(model.skip_scaling.networks):
        prefix = "se" if mode == "ls" else f"se.{2 - i}"
        for ours, theirs in ("fc1", "layer1"), ("fc2", "layer2"):
            for leaf, value in getattr(network, ours).state_dict().items():
                state_dict[f"{prefix}.{theirs}.{leaf}"] = value
    load_published(fresh, state_dict)
    assert_same_function(model, fresh)


def test_learned_scales_that_a_file_does_not_know_stay_as_they_are(randomize):
    plain, scaled = randomize(small(UViT)), randomize(small(UViT, skip_scaling="ls"), seed=1)
    before = {name: value.clone() for name, value in scaled.skip_scaling.state_dict().items()}
    load_published(scaled, released(plain))
    assert all(torch.equal(value, before[name]) for name, value in scaled.skip_scaling.state_dict().items())
    assert torch.equal(scaled.encoder[1].fc1.weight, plain.encoder[1].fc1.weight)


def test_only_the_first_rows_of_a_longer_table_of_times_are_used(randomize):
    long, short = randomize(small(ViT, timesteps=4000)), small(ViT)
    load_published(short, released(long))
    assert torch.equal(short.time.weight, long.time.weight[:1000])
    assert_same_function(long, short)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_weights_that_do_not_fit_are_named(backbone, randomize):
    state_dict = released(randomize(small(backbone)))
    missing = {name: value for name, value in state_dict.items() if name != "pos_embed"}
    for wrong, named in [(missing, "position"), ({**state_dict, "surprise.weight": torch.zeros(1)}, "surprise.weight"),
                         ({**state_dict, "pos_embed": torch.zeros(1, 5, 32)}, "position.*5.*17")]:
        with pytest.raises(ValueError, match="do not fit.*" + named) as refusal:
            load_published(small(backbone), wrong)
        assert "\n" not in str(refusal.value)


def test_the_lesson_prints_every_part_and_its_parameters(run_lesson):
    printed = run_lesson("uvit")
    model = UViT(32, patch=4, width=192, depth=6, heads=4, num_classes=10, skip_scaling="ls")
    for part in "patch_embed", "encoder.2", "middle", "decoder.0", "final_conv":
        row = next(line for line in printed.splitlines() if line.startswith(part + " "))
        assert f"{sum(p.numel() for p in model.get_submodule(part).parameters()):,d}" in row
    assert f"{sum(p.numel() for p in model.parameters()):,d}" in printed and max(map(len, printed.splitlines())) <= 125
