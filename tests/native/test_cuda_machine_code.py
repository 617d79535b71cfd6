"""The machine code of the kernels: the width of the loads, how many are in flight, the packed minima, no spills.

Counts do not depend on a machine, so they can be held where there is no GPU. They need nvcc and a disassembler
(`pip install nvidia-cuda-nvdisasm`, or the toolkit's own).
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.slow  # each architecture compiles for a quarter of a minute

LABEL = re.compile(r"^(\.L_\w+):")
FUNCTION = re.compile(r"^\.text\.(\S+):")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?(.*?)\s*;")
BRANCH = re.compile(r"^BRA\S*\s.*`\((\.L_\w+)\)")

# Per 64 bytes of one thread, that is four loads: what computes the minima and maxima, and how many there are.
WORDS, PAIRS, WORDS3, PAIRS3 = "IMNMX.U32", "VIMNMX.U16x2", "VIMNMX3.U32", "VIMNMX3.U16x2"
MINIMA = {
    "80": {
        "f32": {WORDS: 32},
        "f16": {WORDS: 64},
        "bf16": {WORDS: 64},
        "f8_e4m3fn": {WORDS: 128},
        "f8_e5m2fnuz": {WORDS: 128},
    },
    "90": {
        "f32": {WORDS3: 16},
        "f16": {PAIRS3: 16},
        "bf16": {PAIRS3: 16},
        "f8_e4m3fn": {PAIRS3: 32},
        "f8_e5m2": {PAIRS3: 32},
        "f8_e4m3fnuz": {PAIRS3: 32},
        "f8_e5m2fnuz": {PAIRS3: 32},
        "f8_e8m0fnu": {PAIRS3: 32},
    },
    "120": {
        "f32": {"VIMNMX.U32": 32},
        "bf16": {PAIRS: 32},
        "f8_e4m3fn": {PAIRS: 64},
    },
}
# All instructions of that loop. An H200 SM has some 117 cycles for 64 bytes of each lane of a warp and issues four
# instructions in each (4.8 TB/s, 132 SMs, 1.98 GHz); half of them may be of the kind that minima are.
LENGTHS = {
    "90": {"range": {"f32": 48, "f16": 48, "bf16": 48, "f8_e4m3fn": 80, "f8_e5m2": 80, "f64": 90},
           "health": {"f32": 150, "f16": 150, "bf16": 150, "f8_e4m3fn": 180}},
    "80": {"range": {"f32": 64, "f16": 112, "bf16": 112, "f8_e4m3fn": 212},
           "health": {"f32": 165, "bf16": 212}},
}  # fmt: skip


def _nvcc() -> str:
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip("nvcc was not found")
    return found


def _disassembler() -> str:
    places = ["/usr/local/cuda/bin"]
    namespace = importlib.util.find_spec("nvidia")
    for home in namespace.submodule_search_locations or () if namespace else ():
        places += [str(path.parent) for path in Path(home).glob("*/bin/nvdisasm")]
    found = shutil.which("nvdisasm") or next(
        filter(None, (shutil.which("nvdisasm", path=p) for p in places)), None
    )
    if found is None:
        pytest.skip("nvdisasm was not found; `pip install nvidia-cuda-nvdisasm` brings one")
    return found


@functools.cache
def _compiled(source: str, architecture: str) -> tuple[str, str]:
    """ptxas' report and the disassembly."""
    disassembler = _disassembler()
    with tempfile.TemporaryDirectory() as folder:
        binary = str(Path(folder, "kernels.cubin"))
        command = [_nvcc(), "-cubin", "-O3", "-std=c++17", f"-arch=sm_{architecture}", "-Xptxas=-v", "-Icsrc"]
        done = subprocess.run([*command, source, "-o", binary], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        text = subprocess.run([disassembler, "-c", binary], capture_output=True, text=True, check=True).stdout
    return done.stdout + done.stderr, text


def functions(source: str, architecture: str) -> dict[str, list[str]]:
    """The lines of each function: instructions, and labels with a colon."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in _compiled(source, architecture)[1].splitlines():
        if match := FUNCTION.match(line.strip()):
            lines = found.setdefault(match.group(1), [])
        elif match := INSTRUCTION.search(line):
            lines.append(match.group(1))
        elif match := LABEL.match(line):
            lines.append(match.group(1) + ":")
    return found


def inner_loops(lines: list[str]) -> list[list[str]]:
    """The instructions of each loop that has no other inside."""
    at = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    spans = []
    for i, line in enumerate(lines):
        match = BRANCH.match(line)
        if match and at.get(match.group(1), i) < i:
            spans.append((at[match.group(1)], i + 1))
    inner = [s for s in spans if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in spans)]
    return [[line for line in lines[a:b] if not line.endswith(":")] for a, b in inner]


def is_load(instruction: str) -> bool:
    return instruction.startswith("LDG.E") and ".128" in instruction.split()[0]


def loads_in_flight(loop: list[str]) -> int:
    """16-byte loads before the first instruction that reads what one of them brings."""
    pending: set[str] = set()
    loads = 0
    for instruction in loop:
        opcode, _, operands = instruction.partition(" ")
        registers = [int(number) for number in re.findall(r"\bR(\d+)", operands)]
        if is_load(instruction):
            loads += 1
            pending |= {f"R{registers[0] + k}" for k in range(4)}
        elif pending & {f"R{number}" for number in registers[1:]} and not opcode.startswith("BRA"):
            break
    return loads


def reading_loop(kernel: str, architecture: str) -> list[str]:
    """The one loop of a kernel of one_format.cu that reads whole steps."""
    lines = functions("tests/native/cuda_host/one_format.cu", architecture)[kernel]
    (loop,) = [loop for loop in inner_loops(lines) if sum(map(is_load, loop)) >= 4]
    return loop


@pytest.mark.parametrize(("architecture", "name"), [(a, name) for a in MINIMA for name in MINIMA[a]])
def test_minima_per_64_bytes(architecture: str, name: str) -> None:
    """A format's loop has four 16-byte loads on the way and the packed minima of the architecture, no more of them."""
    loop = reading_loop(f"range_{name}", architecture)
    assert sum(map(is_load, loop)) == 4
    assert loads_in_flight(loop) == 4
    minima = Counter(
        opcode for opcode in (instruction.split()[0] for instruction in loop) if "MNMX" in opcode
    )
    ((opcode, count),) = MINIMA[architecture][name].items()
    assert minima[opcode] >= count - 2  # ptxas may make two of one that folds three
    assert minima.total() <= count + 2


@pytest.mark.parametrize(
    ("architecture", "what", "name"),
    [(a, w, name) for a in LENGTHS for w in LENGTHS[a] for name in LENGTHS[a][w]],
)
def test_instructions_per_64_bytes(architecture: str, what: str, name: str) -> None:
    """The loop leaves the memory, not the issue slots, as the limit."""
    loop = reading_loop(f"{what}_{name}", architecture)
    assert loads_in_flight(loop) == 4
    assert len(loop) <= LENGTHS[architecture][what][name]


@pytest.mark.parametrize("architecture", ["80", "90"])
def test_the_library_spills_nothing(architecture: str) -> None:
    """Every kernel keeps to 64 registers, so that two blocks fit a multiprocessor, and leaves local memory alone.

    But for the recorder's: after its loops it calls what looks closer, and hands that its arguments there. Its plain
    kernel, for memory that is misaligned, does so all along.
    """
    report, _ = _compiled("csrc/cuda/range_cuda.cu", architecture)
    registers = dict(re.findall(r"Compiling entry function '(\w+)'(?:.*\n)+?.*Used (\d+) registers", report))
    assert len(registers) == 8
    assert max(map(int, registers.values())) <= 64
    found = functions("csrc/cuda/range_cuda.cu", architecture)
    assert [name for name in found if "fast_kernel" in name and "Sighting" in name]
    for name, lines in found.items():
        if "fast_kernel" in name and "Sighting" in name:
            lines = [line for loop in inner_loops(lines) if any(map(is_load, loop)) for line in loop]
            assert lines
        elif "plain_kernel" in name and "Sighting" in name:
            continue
        assert not [line for line in lines if line.startswith(("STL", "LDL"))], name


@pytest.mark.parametrize("architecture", ["80", "90"])
def test_every_format_of_the_library_has_its_loop(architecture: str) -> None:
    """The kernels that are shipped have the loops of four loads that the tests above see alone, one for each layout."""
    fast = {
        name: lines
        for name, lines in functions("csrc/cuda/range_cuda.cu", architecture).items()
        if "fast_kernel" in name
    }
    assert len(fast) == 4
    for name, lines in fast.items():
        loops = [loop for loop in inner_loops(lines) if sum(map(is_load, loop)) == 4]
        assert len(loops) == 13
        in_flight = [loads_in_flight(loop) for loop in loops]
        # A health of fnuz on sm_80 has so much to keep that its fourth load comes after the first use.
        assert min(in_flight) >= (3 if "DeviceHealth" in name else 4)
        assert in_flight.count(4) >= 12
