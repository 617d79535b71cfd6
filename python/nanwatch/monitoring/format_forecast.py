"""Forecasts of linear layers that leave a block format: SQNR that falls, or elements that saturate or become zero."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import isnan

import numpy as np

from ..instrumentation.linear_formats import LEAST_SQNR, FormatLoss, LinearFormats
from ..recording.events import PeakName
from ..util.visible import module_name, visible
from .forecast import Forecast, Forecaster

# A layer has left a format where its SQNR is below LEAST_SQNR, or where this share saturates or becomes zero.
MOST_LOST = 0.5
_DECIBELS = 20 * float(np.log10(2))  # of a bit


@dataclass(frozen=True, slots=True)
class FormatForecast(Forecast):
    """Prediction that an operand of a linear layer leaves the block format `dtype` near `batch`.

    `label` is the operand and its measure. `bits` are doublings that the noise, or the lost share, has left.
    """

    def __str__(self) -> str:
        operand, _, measure = self.label.partition(" ")
        if measure == "SQNR":
            now = f"SQNR {LEAST_SQNR + _DECIBELS * self.bits:.1f} dB in {self.dtype}"
            end = f"below {LEAST_SQNR:g} dB"
        else:
            now = f"{MOST_LOST * 2**-self.bits:.1%} of the elements {measure} in {self.dtype}"
            end = f"above {MOST_LOST:.0%}"
        text = f"`{operand}` of {module_name(self.module)}: {now}, {end} expected near batch {self.batch:,}"
        return visible(f"{text} (± {self.plus_minus:,})")


class FormatForecaster:
    """Forecaster for each block format, over the batches in which the operands of linear layers are read."""

    def __init__(self, formats: LinearFormats) -> None:
        self._formats = formats
        # By format, with the place of each operand's measure. A magnitude of 1 is the end.
        self._forecasters: dict[str, tuple[Forecaster, dict[PeakName, int]]] = {
            name: (Forecaster(end=0.0), {}) for name in formats.formats
        }

    def end(self, batch: int) -> list[Forecast]:
        """Take what was found in a batch that has ended. Return the new forecasts."""
        found: list[Forecast] = []
        losses = self._formats.found(batch)
        for name, (forecaster, places) in self._forecasters.items():
            values = {
                (one.module, f"{one.operand} {measure}", name): value
                for one in losses
                if one.format == name and not isnan(one.sqnr)
                for measure, value in _magnitudes(one)
            }
            if not values:
                continue
            new = [key for key in values if key not in places]
            places.update({key: len(places) + i for i, key in enumerate(new)})
            forecaster.meet(new)
            row = np.zeros(len(places))
            row[[places[key] for key in values]] = list(values.values())
            found += [FormatForecast(*astuple(one)) for one in forecaster.end(batch, row.tobytes())]
        return found


def _magnitudes(one: FormatLoss) -> list[tuple[str, float]]:
    """Return the amplitude of the noise and the shares, each in units of its end; 0 is no number."""
    return [
        ("SQNR", 10 ** ((LEAST_SQNR - one.sqnr) / 20)),
        ("saturate", one.saturated / MOST_LOST),
        ("become zero", one.flushed / MOST_LOST),
    ]
