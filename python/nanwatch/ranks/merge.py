"""Merge of the reports of several ranks: the origin, headroom by module and rank, and replicas that differ.

Only ranks of one attempt of an elastic job are compared with each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, isnan
from pathlib import Path
from statistics import median_low
from typing import NamedTuple, TypeVar

from ..records.headroom import by_module
from ..records.record import Record
from ..report.finding import Finding, RankObservation, earliest
from ..report.report import Report
from ..report.spike import SpikeReport, read_saved
from ..util import reading
from ..util.job import Attempt
from ..util.progress import Tell, silent

_T = TypeVar("_T")
_FILE = "report.json"
_OUTLYING = 8  # ranks that are named of a module; all are counted
_LEAST_DISTANCE = 1.0  # bits: healthy ranks, which see other data, differ by a factor of two too


class RanksRange(NamedTuple):
    """Range, and the ranks that have it."""

    abs_min: float
    abs_max: float
    ranks: tuple[int, ...]


class RankBits(NamedTuple):
    """Rank, and its bits of headroom."""

    rank: int
    bits: float


@dataclass(frozen=True, slots=True)
class WeightRanges:
    """Ranges of a weight on all ranks that saw it in one batch, the range of most ranks first."""

    batch: int
    module: str
    label: str
    shape: tuple[int, ...] | None
    ranges: tuple[RanksRange, ...]


@dataclass(frozen=True, slots=True)
class ModuleHeadroom:
    """Bits of headroom of one module over the `num_ranks` ranks that saw it.

    `spread` is the most less the least, None where that is no number. A rank is outlying if it is further from the
    median than a bit and than four times the median distance. `outlying` has the furthest eight.
    """

    module: str
    num_ranks: int
    least: float
    least_rank: int
    median: float
    most: float
    most_rank: int
    spread: float | None
    num_nonfinite: int
    num_outlying: int
    outlying: tuple[RankBits, ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """Digests of the ranks of one attempt, sorted by rank; the files that were left out; the other attempts.

    `others`, the earliest first, have no others themselves.
    """

    digests: tuple[Digest, ...]
    left_out: tuple[str, ...]
    others: tuple[Merged, ...] = ()

    @property
    def attempt(self) -> Attempt | None:
        """The attempt of all digests, None where the reports name none."""
        return self.digests[0].attempt

    @property
    def ranks(self) -> list[int]:
        """The ranks, ascending."""
        return [digest.rank for digest in self.digests]

    @property
    def failed(self) -> list[Digest]:
        """The digests with a finding, the earliest first: by batch, by place in it, by rank."""
        return [one for _, one in self._seen()]

    @property
    def origins(self) -> list[Digest]:
        """The digests with the earliest finding: by batch, then by the place of the non-finite frame in it.

        Several ranks may have theirs at one place.
        """
        seen = self._seen()
        inside = next((observation for observation, _ in seen if not observation.came_with_the_data), None)
        data = next((observation for observation, _ in seen if observation.came_with_the_data), None)
        first = earliest(inside, data)
        return [one for observation, one in seen if first is not None and observation.place == first.place]

    def _seen(self) -> list[tuple[RankObservation, Digest]]:
        seen = [(observation, one) for one in self.digests if (observation := one.observation) is not None]
        return sorted(seen, key=lambda pair: pair[0].order)

    def modules(self) -> list[str]:
        """Return all modules that have a headroom on some rank, the one with the least first."""
        least: dict[str, float] = {}
        for digest in self.digests:
            for name, bits in digest.headroom.items():
                least[name] = min(bits, least.get(name, inf))
        return sorted(least, key=lambda name: (least[name], name))

    def column(self, module: str) -> list[float | None]:
        """Return the bits of headroom of the module on each rank, None where it has none."""
        return [digest.headroom.get(module) for digest in self.digests]

    def summary(self, module: str) -> ModuleHeadroom:
        """Return the module's headroom over all ranks. Raises KeyError when no rank has any."""
        seen = [(one.headroom[module], one.rank) for one in self.digests if module in one.headroom]
        if not seen:
            raise KeyError(module)
        middle = median_low(bits for bits, _ in seen)
        distances = [0.0 if bits == middle else abs(bits - middle) for bits, _ in seen]
        far = max(_LEAST_DISTANCE, 4 * median_low(distances))
        outlying = sorted(
            (-distance, rank, bits)
            for distance, (bits, rank) in zip(distances, seen, strict=True)
            if distance > far
        )
        least, most = min(seen), max(seen, key=lambda pair: (pair[0], -pair[1]))
        spread = most[0] - least[0]
        return ModuleHeadroom(
            module=module,
            num_ranks=len(seen),
            least=least[0],
            least_rank=least[1],
            median=middle,
            most=most[0],
            most_rank=most[1],
            spread=None if len(seen) == 1 or isnan(spread) else spread,
            num_nonfinite=sum(bits == -inf for bits, _ in seen),
            num_outlying=len(outlying),
            outlying=tuple(RankBits(rank, bits) for _, rank, bits in outlying[:_OUTLYING]),
        )

    def weights(self) -> list[WeightRanges]:
        """Return every weight of every batch, by batch, module and label, with its ranges.

        Replicas hold equal weights, so their ranges are equal to the bit. Shards of one weight are not compared.
        """
        # Keep only the ranks of each range: one number per rank where replicas are alike.
        seen: dict[WeightKey, dict[tuple[float | None, ...], tuple[tuple[float, float], list[int]]]] = {}
        for digest in self.digests:
            for weight, pair in digest.weights.items():
                key = tuple(None if isnan(end) else end for end in pair)  # a nan is not equal to itself
                seen.setdefault(weight, {}).setdefault(key, (pair, []))[1].append(digest.rank)
        found = []
        for weight, groups in seen.items():
            most_first = sorted(groups.values(), key=lambda group: (-len(group[1]), group[1]))
            ranges = tuple(RanksRange(*pair, tuple(ranks)) for pair, ranks in most_first)
            found.append(WeightRanges(*weight, ranges))
        return sorted(found, key=lambda one: (one.batch, one.module, one.label, one.shape or ()))

    def differences(self) -> list[WeightRanges]:
        """Return the weights that differ between ranks that saw them in the same batch."""
        return [one for one in self.weights() if len(one.ranges) > 1]


def merge(*paths: Path, attempt: str | None = None, tell: Tell = silent) -> Merged:
    """Merge every `report.json` below the folders, and the files.

    `attempt`, as "1" or "RUN_ID/1", chooses one of several attempts of an elastic job, by default the latest with a
    finding, or the latest. Of several reports of one rank the earliest failure counts. Raises ValueError when no report
    can be read, or there is no such attempt. A report that cannot be read is left out and named.
    """
    left_out: list[str] = []
    attempts = by_attempt(_read(paths, left_out, tell))
    if not attempts:
        what = " and ".join(map(str, paths))
        why = f": {left_out[0]}" if left_out else "; pass the folder that watch(output_dir=...) was given"
        raise ValueError(f"no {_FILE} of nanwatch below {what}{why}")
    chosen = _chosen(attempts, attempt)
    others = tuple(one for one in attempts if one is not chosen)
    return replace(chosen, left_out=tuple(left_out), others=others)


def _read(paths: Sequence[Path], left_out: list[str], tell: Tell) -> Iterator[Digest]:
    """Yield the digests of all files. Add the reason to `left_out` for a file that has none."""
    tell(f"looking for {_FILE}")
    files = list(_files(paths))
    for done, path in enumerate(files):
        tell("reading reports", done, len(files), "files")
        try:
            text = reading.file_text(path)
            # One report at a time, because a parsed one takes ten times the size of its file.
            report = read_saved(text)
            digest = None if isinstance(report, SpikeReport) else Digest.of(report)
        except (OSError, ValueError) as error:
            left_out.append(f"{path}: {error}")
            continue
        if digest is not None:
            yield digest


def by_attempt(digests: Iterable[Digest]) -> list[Merged]:
    """Return a merge for each attempt, the earliest first; digests without an attempt come before."""
    kept: dict[object, dict[int, Digest]] = {}
    for digest in digests:
        ranks = kept.setdefault(digest.attempt and digest.attempt.key, {})
        other = ranks.get(digest.rank)
        if other is None or _when(digest) < _when(other):
            ranks[digest.rank] = digest
    made = [_of_one_attempt([ranks[rank] for rank in sorted(ranks)]) for ranks in kept.values()]
    return sorted(
        made, key=lambda one: (one.attempt.begun, one.attempt.run_id) if one.attempt else (-inf, "")
    )


def _of_one_attempt(digests: Sequence[Digest]) -> Merged:
    seen = [one.attempt for one in digests if one.attempt is not None]
    if not seen:
        return Merged(tuple(digests), ())
    # Each launcher counts by itself, and each process begins at its own moment.
    attempt = replace(seen[0], number=max(one.number for one in seen), begun=min(one.begun for one in seen))
    return Merged(tuple(replace(one, attempt=attempt) for one in digests), ())


def _chosen(attempts: Sequence[Merged], wanted: str | None) -> Merged:
    if wanted is None:
        return ([one for one in attempts if one.failed] or attempts)[-1]
    run_id, slash, number = wanted.rpartition("/")
    fitting = [
        one
        for one in attempts
        if one.attempt is not None
        and str(one.attempt.number) == number
        and (not slash or one.attempt.run_id == run_id)
    ]
    if not fitting:
        there = "; ".join(str(one.attempt) for one in attempts if one.attempt is not None)
        raise ValueError(
            f"there is no attempt {wanted!r}: {f'there is {there}' if there else 'no report names any'}"
        )
    return fitting[-1]


def _files(paths: Sequence[Path]) -> Iterable[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(path.rglob(_FILE))
        else:
            yield path


def _when(digest: Digest) -> tuple[float, int]:
    finding = digest.finding
    return (inf, 0) if finding is None else (finding.batch, finding.sequence or 0)


class WeightKey(NamedTuple):
    """Name of a weight in a batch, equal on all ranks that hold it."""

    batch: int
    module: str
    label: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Digest:
    """One rank's part in a merge.

    `finding` has the rank of the report and always a sequence: if the report has none, it is the number of frames of
    the batch in the report before the non-finite one. `headroom` is in bits, by module. `weights` has abs_min and
    abs_max. `attempt` is the report's, and after a merge equal on all ranks.
    """

    rank: int
    finding: Finding | None
    headroom: dict[str, float]
    weights: dict[WeightKey, tuple[float, float]]
    attempt: Attempt | None = None

    @classmethod
    def of(cls, report: Report) -> Digest:
        """Return the digest of a report."""
        bits = {_shared(name): bits for name, bits in by_module(report.frames).items()}
        weights = {
            _shared(WeightKey(frame.batch, frame.name, record.label, record.shape)): pair
            for frame in report.frames
            for record in frame.records
            if (pair := _comparable(record)) is not None
        }
        return cls(report.rank, _finding(report), bits, weights, report.attempt)

    @property
    def observation(self) -> RankObservation | None:
        """The finding in the form in which ranks compare theirs."""
        finding = self.finding
        return (
            None
            if finding is None
            else RankObservation.of(finding, self.rank, finding.sequence or 0, None, "")
        )


@lru_cache(maxsize=1 << 17)
def _shared(value: _T) -> _T:
    """Return an equal value, mostly the same object each time: ranks share names and ranges."""
    return value


def _finding(report: Report) -> Finding | None:
    finding = report.finding
    if finding is None:
        return None
    sequence = finding.sequence
    if sequence is None:
        frames = [frame for frame in report.frames if frame.batch == finding.batch]
        sequence = next((i for i, frame in enumerate(frames) if frame.fault is not None), len(frames))
    return replace(finding, rank=report.rank, sequence=sequence)


def _comparable(record: Record) -> tuple[float, float] | None:
    if record.role != "weight" or record.note or record.abs_min is None or record.abs_max is None:
        return None
    pair: tuple[float, float] = _shared((record.abs_min, record.abs_max))
    return pair
