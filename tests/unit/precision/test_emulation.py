"""Linear layers that multiply operands of another format: the products, their gradients, and what is put back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanwatch.numerics.block_reference import quantized
from nanwatch.precision.emulation import Rounding, emulated, linear_layers, rotated


def made(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(inside: int = 64, outside: int = 48, *, bias: bool = True) -> nn.Linear:
    linear = nn.Linear(inside, outside, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(made(outside, inside, seed=1))
    return linear


def test_a_product_by_hand() -> None:
    """1.1 has no element in MXFP4 and rounds to 1: under the scale 2 of a block with 6 as its largest, 1.6 to 1.5."""
    model = nn.Linear(32, 1, bias=False)
    nn.init.zeros_(model.weight)
    with torch.no_grad():
        model.weight[0, :2] = torch.tensor([6.0, 1.6])
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([4.0, 1.1])
    with emulated(model, {"": "mxfp4"}):
        assert model(x).item() == 6.0 * 4.0 + 1.5 * 1.0
    assert model(x).item() == pytest.approx(6.0 * 4.0 + 1.6 * 1.1)


def test_bfloat16_is_a_cast_of_the_operands() -> None:
    """The product of rounded operands is taken in float32 and stays there."""
    model, x = layer(), made(5, 64)
    with emulated(model, {"": "bfloat16"}):
        y = model(x)
    operands = x.bfloat16().float(), model.weight.bfloat16().float()
    assert torch.equal(y, F.linear(operands[0], operands[1], model.bias))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "float8_rowwise", "float8_block128x128"])
@pytest.mark.parametrize("backward", [False, True])
def test_gradients_are_those_of_three_matmuls(name: str, backward: bool) -> None:
    """Each operand is rounded along the axis that its matmul contracts; the last block of 40 tokens is a short one."""
    model, x, gradient = layer(), made(4, 10, 64), made(4, 10, 48, seed=2)
    x.requires_grad_()
    with emulated(model, {"": name}, Rounding(backward=backward)):
        model(x).backward(gradient)

    other = "float8_block1x128" if name == "float8_block128x128" else name
    rows, tokens, weight = gradient.reshape(40, 48), x.detach().reshape(40, 64), model.weight.detach()
    expected = [rows @ weight, rows.T @ tokens]
    if backward:
        expected = [
            quantized(rows, other, 1) @ quantized(weight, name, 0),
            quantized(rows, other, 0).T @ quantized(tokens, other, 0),
        ]
    assert x.grad is not None
    torch.testing.assert_close(x.grad.reshape(40, 64), expected[0])
    torch.testing.assert_close(model.weight.grad, expected[1])
    torch.testing.assert_close(model.bias.grad, rows.sum(0))


@pytest.mark.parametrize("size", [16, 32])
def test_a_rotation_leaves_the_exact_product_and_helps_outliers(size: int) -> None:
    """Of operands with one outlier each, the rotated product in MXFP4 is the nearer one."""
    model, x = layer(72), made(40, 72)
    x[:, 3] *= 50
    for dim, one in ((-1, x), (0, x), (-1, model.weight)):
        assert not torch.equal(rotated(one, dim, size), one)
        assert rotated(one, dim, size).shape == one.shape
    a, b = rotated(x, -1, size), rotated(model.weight, -1, size)
    torch.testing.assert_close(a @ b.T, x @ model.weight.T, rtol=1e-5, atol=1e-4)  # a sum of 50 * 4
    exact, errors = model(x).detach(), []
    for rounding in (Rounding(), Rounding(hadamard=size)):
        with emulated(model, {"": "mxfp4"}, rounding):
            errors.append(float((model(x).detach() - exact).norm()))
    assert errors[1] < errors[0] * 0.9


def test_stochastic_rounding_has_the_right_mean() -> None:
    """The mean of many gradients is far nearer than one of them, and the model's own random numbers are left alone."""
    model, x, gradient = layer(32, 32, bias=False), made(32, 32), made(32, 32, seed=2)
    quiet = Rounding(backward=True)
    exact = gradient.T @ quantized(x, "nvfp4", 0)
    before = torch.get_rng_state()

    def error(number: int, rounding: Rounding) -> float:
        total = torch.zeros(32, 32)
        for seed in range(number):
            with emulated(model, {"": "nvfp4"}, rounding, seed=seed):
                total += torch.autograd.grad(model(x), model.weight, gradient)[0]
        return float((total / number - exact).norm() / exact.norm())

    noisy = Rounding(backward=True, stochastic=True)
    assert error(100, noisy) < error(1, quiet) / 3 < error(1, noisy)
    assert error(1, noisy) == error(1, noisy)
    assert torch.equal(torch.get_rng_state(), before)


def test_autocast_decides_the_dtypes() -> None:
    """Under autocast the operands are rounded from bfloat16, and the product is bfloat16."""
    model, x = layer(), made(5, 64)
    with torch.autocast("cpu", torch.bfloat16), emulated(model, {"": "mxfp8"}):
        y = model(x)
    operands = quantized(x.bfloat16(), "mxfp8"), quantized(model.weight.bfloat16(), "mxfp8")
    assert torch.equal(y, F.linear(operands[0], operands[1], model.bias.bfloat16().float()).bfloat16())


class Doubled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = super().forward(input) * 2
        return output


def test_everything_is_as_it_was_also_after_an_exception() -> None:
    """Hooks are called, a forward that somebody put into the module is called and stays, and state_dict is the same."""
    first, second = nn.Linear(32, 32), Doubled(32, 8)
    model = nn.Sequential(first, second)
    calls: list[str] = []
    first.register_forward_hook(lambda *_: calls.append("hook"))
    own = second.forward

    def patched(x: Tensor) -> Tensor:
        calls.append("patched")
        return own(x)

    second.forward = patched  # type: ignore[method-assign,assignment]
    before = [dict(vars(one)) for one in model.modules()]
    x, state = made(4, 32), copy.deepcopy(model.state_dict())
    plain = model(x)
    calls.clear()
    results: list[Tensor] = []

    def fail_inside() -> None:
        with emulated(model, {"0": "mxfp4", "1": "mxfp4"}):
            assert type(first) is nn.Linear
            assert model.state_dict().keys() == state.keys()
            results.append(model(x))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail_inside()
    assert calls == ["hook", "patched"]
    hidden = F.linear(quantized(x, "mxfp4"), quantized(first.weight, "mxfp4"), first.bias)
    expected = F.linear(quantized(hidden, "mxfp4"), quantized(second.weight, "mxfp4"), second.bias) * 2
    torch.testing.assert_close(results[0], expected)
    assert [dict(vars(one)) for one in model.modules()] == before
    assert torch.equal(model(x), plain)
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())


def test_multiplications_are_counted_for_layers_of_any_format() -> None:
    """A layer without a format is counted and computes as it is."""
    model, x, counted = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), made(3, 5, 16), dict[str, int]()
    plain = model(x)
    with emulated(model, {}, count=lambda name, amount: counted.update({name: amount})):
        assert torch.equal(model(x), plain)
    assert counted == {"0": 3 * 5 * 16 * 8, "1": 3 * 5 * 8 * 4}


@pytest.mark.parametrize(
    ("formats", "options", "words"),
    [
        ({"O": "mxfp8"}, {}, "no nn.Linear 'O'"),
        ({"": "mxfp9"}, {}, "no format 'mxfp9'.*mxfp8"),
        ({"": "mxfp8"}, {"hadamard": 8}, "16 or 32, got 8"),
        ({"": "mxfp8"}, {"stochastic": True}, "train=True"),
    ],
)
def test_bad_input(formats: dict[str, str], options: dict[str, Any], words: str) -> None:
    """Errors say what came and what is accepted."""
    with pytest.raises(ValueError, match=words), emulated(layer(), formats, Rounding(**options)):
        pass


def test_a_model_without_linear_layers() -> None:
    """The error says what has to be done for layers of another class."""
    with pytest.raises(ValueError, match=r"ReLU has no nn\.Linear"):
        linear_layers(nn.ReLU())


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_the_product_is_torchaos(name: str) -> None:
    """The same numbers as torchao's emulated linear layer with OCP's rule of the scale, in bfloat16."""
    mx = pytest.importorskip("torchao.prototype.mx_formats")
    quantization = pytest.importorskip("torchao.quantization")
    preference = pytest.importorskip("torchao.quantization.quantize_.common.kernel_preference")

    dtype = torch.float8_e4m3fn if name == "mxfp8" else torch.float4_e2m1fn_x2
    model, x = layer(128, 96).bfloat16(), made(16, 128).bfloat16()
    with emulated(model, {"": name}):
        ours = model(x)
    config = mx.MXDynamicActivationMXWeightConfig(
        activation_dtype=dtype,
        weight_dtype=dtype,
        kernel_preference=preference.KernelPreference.EMULATED,
        scaling_mode=mx.ScaleCalculationMode.FLOOR,
    )
    holder = nn.Sequential(model)
    quantization.quantize_(holder, config)
    torch.testing.assert_close(ours, holder(x), rtol=2**-8, atol=2**-8)  # bfloat16's rounding of one sum
