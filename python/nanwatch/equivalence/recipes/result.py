"""The result of `nanwatch.recipe`, and its forms: text, JSON, torchao's and TransformerEngine's configurations."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ...util.reading import plain
from ...util.visible import module_name
from ..results import as_text, wrapped
from .forwards import Distance

SCHEMA, VERSION = "nanwatch.recipe", 1
# Configurations that torchao's quantize_ takes: expressions with names of torch, torchao.quantization and
# torchao.prototype.mx_formats.
_MX = "MXDynamicActivationMXWeightConfig(%sscaling_mode=ScaleCalculationMode.FLOOR)"
_FLOAT8 = "Float8DynamicActivationFloat8WeightConfig(granularity=%s)"
_DTYPES = "activation_dtype=torch.{0}, weight_dtype=torch.{0}, "
TORCHAO = {
    "mxfp8": _MX % "",
    "mxfp4": _MX % _DTYPES.format("float4_e2m1fn_x2"),
    "nvfp4": "NVFP4DynamicActivationNVFP4WeightConfig()",
    "float8_tensorwise": _FLOAT8 % "PerTensor()",
    "float8_rowwise": _FLOAT8 % "PerRow()",
    "float8_block128x128": _FLOAT8 % "(PerBlock([1, 128]), PerBlock([128, 128]))",
}
# The recipe class of transformer_engine.common.recipe.
TRANSFORMER_ENGINE = {
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
    "float8_tensorwise": "Float8CurrentScaling",
    "float8_block128x128": "Float8BlockScaling",
}
_MOST_LAYERS = 20
_LIMITS = (
    "emulation rounds the operands and sums their products in float32. It cannot show the order and the width in which"
    " an accumulator of the hardware adds, what a kernel fuses or rounds between, or the speed. Measure the real"
    " kernels before you rely on a recipe."
)
_TRAINS = "The loss of one batch does not see how gradients are rounded. Only the columns of gradients do."


@dataclass(frozen=True, slots=True)
class Trial:
    """One layer alone in one format: the relative change of the loss, and how far all gradients move (training).

    `error` is the standard error of the change. `divergence` is how far the predictions move, as a share of the loss:
    the Kullback-Leibler divergence of a cross-entropy, or the mean square of the change for a squared error. Both are
    None for another loss.
    """

    change: float
    gradients: Distance | None = None
    error: float | None = None
    divergence: float | None = None

    @property
    def damage(self) -> float:
        """Return the number by which layers are ordered: the divergence, else the size of the change."""
        return abs(self.change) if self.divergence is None else self.divergence


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """One linear layer: the format that it is given, its own one, and how each format does alone.

    `share` is its share of all layers' multiplications. `gradients` is the distance of its weight's gradient under the
    whole recipe. `beside` is the factor by which the cheapest one damages more beside the others' formats than alone.
    """

    name: str
    format: str
    own_format: str
    share: float
    alone: dict[str, Trial]
    gradients: Distance | None = None
    beside: float = 1.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """Result of `nanwatch.recipe`.

    `change` is the relative change of the loss with the whole recipe, measured by a run of its own. `loss` is that of
    the model as it is and `floor` how far a second equal run is from it. `cost` is the cost of the linear layers:
    multiplications weighted by the bits of their operands, relative to bfloat16. `together` has the relative change of
    the loss with all layers in each format. `forwards` counts the runs that were made. `error` and `divergence` are
    those of the whole recipe, as of a Trial.
    """

    loss: float
    floor: float
    change: float
    loss_budget: float
    cost: float
    cost_before: float
    layers: tuple[LayerRecipe, ...]
    together: dict[str, float]
    forwards: int
    remarks: tuple[str, ...] = ()
    error: float | None = None
    divergence: float | None = None

    @property
    def formats(self) -> dict[str, str]:
        """Formats by the names of the layers, without those that stay as they are."""
        return {one.name: one.format for one in self.layers if one.format != one.own_format}

    @property
    def torchao(self) -> dict[str, str]:
        """torchao's configuration of each layer by its name, where it has one for the layer's format."""
        return {name: TORCHAO[one] for name, one in self.formats.items() if one in TORCHAO}

    @property
    def transformer_engine(self) -> dict[str, list[str]]:
        """Names of the layers by the class of TransformerEngine's recipe, where it has one for the format."""
        classes: dict[str, list[str]] = {}
        for name, one in self.formats.items():
            if one in TRANSFORMER_ENGINE:
                classes.setdefault(TRANSFORMER_ENGINE[one], []).append(name)
        return classes

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        more = {"torchao": self.torchao, "transformer_engine": self.transformer_engine}
        head = {"schema": SCHEMA, "version": VERSION}
        return json.dumps({**head, **plain(self), **more}, allow_nan=False, indent=2)

    def to_text(self) -> str:
        """Return the result for people."""
        trains = any(one.gradients is not None for one in self.layers)
        damage = "" if self.divergence is None else f", damage {100 * self.divergence:.3g} %"
        lines = [
            f"Recipe: {len(self.formats)} of {len(self.layers)} linear layers in narrower formats, at {self.cost:.2f}"
            f" of the cost of bfloat16 (before: {self.cost_before:.2f}).",
            f"Loss:   {self.loss:.6g} as it is, {_percent(self.change)}{_error(self.error)} with the recipe{damage}"
            f" (budget {100 * self.loss_budget:g} %, two equal runs differ by {self.floor:.1g}).",
            "",
            "format               layers  multiplications  loss with all layers in it",
        ]
        for name in dict.fromkeys([*self.together, *(one.own_format for one in self.layers)]):
            change = _percent(self.together[name]) if name in self.together else "as it is"
            shares = [one.share for one in self.layers if one.format == name]
            lines.append(f"{name:<20} {len(shares):>6}  {100 * sum(shares):>13.1f} %  {change}")
        limits = wrapped("Limits:", f"{_LIMITS} {_TRAINS}" if trains else _LIMITS)
        return as_text([*lines, "", *self._table(trains), "", *limits], self.remarks)

    def _table(self, trains: bool) -> list[str]:
        """Return the lines of the layers that are the worst alone."""
        worst = sorted(self.layers, key=lambda one: -max((t.damage for t in one.alone.values()), default=0.0))
        shown = worst[:_MOST_LAYERS]
        has_damage = any(t.divergence is not None for one in worst for t in one.alone.values())
        wide = {name: max(len(name), 20 if has_damage else 9) for name in self.together}
        heads = "".join(f" {name:>{size}}" for name, size in wide.items())
        what = "Change of the loss / damage (divergence)" if has_damage else "The loss"
        lines = [f"{what} with one layer in a format, the worst layers first:", ""]
        lines.append(
            f"{'its format':<20} {'share':>6}{heads}{'  gradient error, cosine' if trains else ''}  layer"
        )
        for one in shown:
            cells = "".join(
                f" {_effect(one.alone[name]) if name in one.alone else '-':>{size}}"
                for name, size in wide.items()
            )
            moved = f"{one.gradients.error:.2g}, {one.gradients.cosine:.4f}" if one.gradients else "-"
            moved = f"  {moved:>22}" if trains else ""
            lines.append(f"{one.format:<20} {100 * one.share:>5.1f}%{cells}{moved}  {module_name(one.name)}")
        if left := len(worst) - len(shown):
            lines.append(f"and {left} more (the JSON document has them all)")
        return lines


def _effect(trial: Trial) -> str:
    damage = "" if trial.divergence is None else f" / {100 * trial.divergence:.2g}"
    return f"{100 * trial.change:+.3g}{damage} %"


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {100 * error:.2g} %"


def _percent(change: float) -> str:
    return f"{100 * change:+.3g} %"
