"""Compiles the kernels of benchmarks/attention_kernels.py and score_kernels.py for Hopper, on a machine without a GPU, as
sm90.py does the package's: `python tests/kernels/sm90_units.py` prints registers, stack (spills) and shared memory. Of
scores it also says how the words of a tile lie in threads, and how many products the tensor cores make."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attention_kernels
import score_kernels
import sm90
import torch
from attention_sweep import ATTENTION, SCORES
from triton import knobs

from sparroll.attention.decode.triton_score_codes import ScoreLayout


def attention() -> Iterator[sm90.Kernel]:
    """Of eight warps, Triton bounds the registers itself, and two numbers spill before the loop: left out."""
    for units, its in ATTENTION.items():
        for variant in its:
            if not isinstance(variant, attention_kernels.Variant) or variant.tile.warps > 4:
                continue
            unit, tile = int(units[0]), variant.tile
            constants = {
                "UNIT": unit, "UNIT_SHIFT": unit.bit_length() - 1, "BLOCK_SHIFT": (16 // unit).bit_length() - 1,
                "HEADS": 8, "G": 2, "D": 128, "LANES_R": 32, "LANES_G": 16, "LANES_D": 128, "TILE": tile.tokens,
                "ALIKE": True, "PLACED": variant.placed, "ASCENDING": variant.ascending, "FUSED": variant.fused,
                "COMPILED": True, "launch_pdl": True,
            }  # fmt: skip
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            yield f"attention {units} {variant}", attention_kernels._gather, constants, options


def scores() -> Iterator[sm90.Kernel]:
    for layout in SCORES["1x1"]:
        if isinstance(layout, score_kernels.BitLayout):
            constants = {
                "UNIT": 1, "UNITS_PER_BLOCK": 16, "FIRST": 16, "RECENT": 32, "HEADS": 8, "G": 2, "D": 128,
                "ROW_WORDS": 5, "LANES_R": 32, "TILE": layout.tile_units, "ALIGN": 4, "STAGES": layout.stages,
                "TENSOR_CORES": True, "launch_pdl": True,
            }  # fmt: skip
            registers = ScoreLayout(layout.warps, layout.programs_per_multiprocessor).most_registers
            options = {"num_warps": layout.warps, "maxnreg": registers, "enable_fp_fusion": False}
            yield f"scores {layout}", score_kernels._score_bits, constants, options


def products(cubin: bytes) -> int:
    """Products of bits, as cuobjdump reads them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.count("BMMA.168256.AND.POPC")


def main() -> None:
    sm90._POINTERS.update(places="*i32", arrivals="*i32")
    places = {
        "PROGRAMS": 264, "HEADS": 8, "UNIT": 4, "LANES_R": 32, "LANES_X": attention_kernels._AT_A_TIME,
    }  # fmt: skip
    for kernel in (("places", attention_kernels._find_places, places, {"num_warps": 4}), *attention()):
        print(f"{kernel[0]}: {sm90.usage(sm90.compiled(kernel, torch.bfloat16)['cubin'])}", flush=True)
    for kernel in scores():
        made = sm90.compiled(kernel, torch.bfloat16)
        line = next(line for line in made["ttgir"].splitlines() if "mma.sync" in line)
        layout = re.search(r"tensor<\d+x4xi32, (#\w+)>", line)
        assert layout, line
        lies = next(line for line in made["ttgir"].splitlines() if line.startswith(f"{layout[1]} ="))
        print(f"{kernel[0]}: {sm90.usage(made['cubin'])} {products(made['cubin'])} products, {lies}", flush=True)


if __name__ == "__main__":
    main()
