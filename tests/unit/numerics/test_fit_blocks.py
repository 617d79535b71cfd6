"""would_fit with a block format, against the published definitions in NumPy: nearest neighbours in a table."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

import nanwatch
from nanwatch.numerics import fit as formats
from nanwatch.numerics.fit import BLOCKS_BY_NAME, BlockFit, block_fit
from support.oracle import from_patterns

INF, NAN = math.inf, math.nan
NAMES = tuple(BLOCKS_BY_NAME)
MX = tuple(name for name in NAMES if name.startswith("mx"))
# OCP Microscaling Formats v1.0, tables 1 to 3 and 5.3: largest, smallest normal, smallest subnormal number.
ELEMENTS = {
    "mxfp8": (448.0, 2.0**-6, 2.0**-9),
    "mxfp8_e5m2": (57344.0, 2.0**-14, 2.0**-16),
    "mxfp6_e3m2": (28.0, 0.25, 0.0625),
    "mxfp6_e2m3": (7.5, 1.0, 0.125),
    "mxfp4": (6.0, 1.0, 0.5),
}
# Rows and columns of a block; None for all of the matrix.
BLOCKS = {
    **dict.fromkeys(MX, (1, 32)),
    "nvfp4": (1, 16),
    "float8_tensorwise": (None, None),
    "float8_rowwise": (1, None),
    "float8_block1x128": (1, 128),
    "float8_block128x128": (128, 128),
}
Floats = npt.NDArray[np.floating]


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 1,000 elements, so that small tensors are cut too."""
    monkeypatch.setattr(formats, "_CHUNK", 1000)


def numbers_of(name: str) -> Floats:
    """Every magnitude of the elements, ascending: the place of each is its word."""
    largest, normal, least = ELEMENTS.get(name, ELEMENTS["mxfp4" if name == "nvfp4" else "mxfp8"])
    found = [0.0]
    while found[-1] < largest:
        size = 2.0 ** math.floor(math.log2(max(found[-1], normal)))
        found.append(found[-1] + max(size / normal, 1.0) * least)
    return np.array(found)


def converted(block: Floats, name: str, of_all: np.float32) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return the values of a block of float32, and which of them round beyond the largest element."""
    numbers = numbers_of(name)
    largest, amax = np.float32(numbers[-1]), of_all if name == "float8_tensorwise" else np.abs(block).max()
    if name in MX:
        exponent = (
            INF if not math.isfinite(amax) else math.frexp(amax)[1] - math.frexp(largest)[1] if amax else -INF
        )
        scale = np.float32(2.0 ** min(max(exponent, -127.0), 128 - math.frexp(largest)[1]))
        factor = np.float32(1 / max(float(scale), 2.0**-126))
        scale = np.float32(NAN) if math.isnan(amax) else scale
    elif name == "nvfp4":
        of_tensor = of_all / np.float32(448 * 6)
        of_tensor = np.float32(1.0) if of_tensor == 0 else of_tensor
        stored = torch.tensor(amax / largest / of_tensor).clamp(2.0**-6, 448.0).to(torch.float8_e4m3fn)
        scale = of_tensor * np.float32(stored.item())
        factor = np.minimum(np.float32(1) / of_tensor, np.finfo(np.float32).max) / np.float32(stored.item())
    else:
        factor = np.float32(float(largest) / np.maximum(np.float64(amax), 1e-12))
        scale = np.float32(1) / factor
    scaled = block * factor
    middles = (numbers[1:] + numbers[:-1]) / 2
    at = np.searchsorted(middles, np.abs(scaled.astype(np.float64)))
    at += (at < len(middles)) & (at % 2 == 1) & (middles[np.minimum(at, len(middles) - 1)] == np.abs(scaled))
    tie = numbers[-1] + (numbers[-1] - numbers[-2]) / 2
    beyond = np.abs(scaled) >= tie if len(numbers) % 2 == 0 else np.abs(scaled) > tie
    elements = np.where(np.isnan(scaled), NAN, np.copysign(numbers[np.minimum(at, len(middles))], scaled))
    elements = elements.astype(np.float32)
    is_divided = name in ("float8_tensorwise", "float8_rowwise")
    return (elements / factor if is_divided else elements * scale), beyond


def expected(x: torch.Tensor, name: str) -> dict[str, float]:
    """Counts and sums of a matrix."""
    matrix = x.float().numpy()
    height, width = (size or whole for size, whole in zip(BLOCKS[name], matrix.shape, strict=True))
    fields = "num_elements num_saturated num_flushed num_lost signal noise"
    counts = dict.fromkeys(fields.split(), 0.0)
    with np.errstate(all="ignore"):
        of_all = np.abs(matrix).max()
        for i in range(0, matrix.shape[0], height):
            for j in range(0, matrix.shape[1], width):
                block = matrix[i : i + height, j : j + width]
                values, beyond = converted(block, name, of_all)
                nonzero, kept = np.isfinite(block) & (block != 0), np.isfinite(block) & np.isfinite(values)
                counts["num_elements"] += nonzero.sum()
                counts["num_saturated"] += (nonzero & beyond).sum()
                counts["num_flushed"] += (nonzero & (values == 0)).sum()
                counts["num_lost"] += (nonzero & ~kept).sum()
                counts["signal"] += (block[kept].astype(np.float64) ** 2).sum()
                counts["noise"] += ((block[kept] - values[kept]).astype(np.float64) ** 2).sum()
    return counts


def check(x: torch.Tensor, name: str) -> None:
    """Compare with `expected`: counts exactly, sums to 1e-6."""
    fit = block_fit(x, BLOCKS_BY_NAME[name])
    for field, value in expected(x, name).items():
        got = getattr(fit, field)
        assert got == pytest.approx(value, rel=1e-6 if field in ("signal", "noise") else 0, abs=0), field


def matrices() -> dict[str, torch.Tensor]:
    """Rows of many sizes with tails, zeros, and numbers of one block that are nan or inf."""
    torch.manual_seed(0)
    sizes = torch.randn(76, 419) * torch.logspace(-38, 37, 76)[:, None]
    special = torch.randn(9, 200)
    for row, value in enumerate([0.0, INF, -INF, NAN, 1e-45, 3.4e38]):
        special[row, ::61] = value
    special[6] = 0.0
    special[7, 32:96] = 0.0
    words = np.random.default_rng(0).integers(0, 1 << 32, 13 * 515).astype("u4")
    random = from_patterns(words, torch.float32).reshape(13, 515)
    return {"sizes": sizes, "special": special, "random": random}


MATRICES = matrices()


@pytest.mark.parametrize("which", MATRICES)
@pytest.mark.parametrize("name", NAMES)
def test_counts_and_sums(name: str, which: str) -> None:
    check(MATRICES[which], name)


@pytest.mark.parametrize("name", NAMES)
def test_every_element_and_every_tie(name: str) -> None:
    """And their float32 neighbours, in blocks whose largest number is the largest element, at two sizes."""
    exact = numbers_of(name)
    exact = np.concatenate([exact, (exact[1:] + exact[:-1]) / 2]).astype(np.float32)
    near = np.concatenate([exact, np.nextafter(exact, np.float32(INF)), np.nextafter(exact, np.float32(0))])
    rows = torch.from_numpy(np.concatenate([near, -near]))
    rows = torch.nn.functional.pad(rows, (0, -len(rows) % 15)).reshape(-1, 15)
    x = torch.cat([torch.full((len(rows), 1), float(exact.max())), rows], 1)
    for scale in (1.0, 2.0**-40):
        check(x * scale, name)


@pytest.mark.parametrize("dim", [0, 1, 2, -2])
@pytest.mark.parametrize(
    "name", ["mxfp4", "nvfp4", "float8_tensorwise", "float8_rowwise", "float8_block128x128"]
)
def test_an_axis_and_any_strides(name: str, dim: int) -> None:
    """The numbers are those of a copy with the axis last."""
    x = torch.randn(6, 50, 40).transpose(1, 2)[:, ::2]
    got = nanwatch.would_fit(x, name, dim=dim)
    there = nanwatch.would_fit(x.movedim(dim, -1).contiguous(), name)
    assert isinstance(got, BlockFit)
    assert isinstance(there, BlockFit)
    assert got.num_flushed == there.num_flushed
    assert got.noise == pytest.approx(there.noise, rel=1e-6)
    with pytest.raises(TypeError, match="got dim='a'; a whole number is accepted"):
        nanwatch.would_fit(x, name, dim="a")  # type: ignore[call-overload]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4), (), (1,), (3, 5, 7)])
def test_any_shape(name: str, shape: tuple[int, ...]) -> None:
    fit = nanwatch.would_fit(torch.ones(shape), name)
    assert isinstance(fit, BlockFit)
    assert fit.num_elements == math.prod(shape)
    assert (fit.saturated, fit.flushed) == (0.0, 0.0)
    assert math.isnan(fit.sqnr) == (fit.num_elements == 0)
