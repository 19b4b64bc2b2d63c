"""All kernels compile for Hopper, on any machine that has NVIDIA's assembler."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton runs on Linux only")

ROOT = Path(__file__).parents[2]


def launched() -> set[str]:
    """File and function of every kernel that is launched in the package: `_kernel[grid](...)`."""
    return {
        f"{path.stem}.{name}"
        for path in (ROOT / "src").rglob("*.py")
        if "import triton" in (text := path.read_text())
        for name in re.findall(r"^ +(_\w+)\[.+\]\($", text, re.MULTILINE)
    }


def compiled(which: str, cache: Path) -> list[str]:
    """What sm90.py tells of each kernel. Hardly one spills registers, and none has a reduction that triton gets wrong or
    writes before the kernel in front of it has ended."""
    from triton import knobs

    for tool in ("ptxas", "cuobjdump", "nvdisasm"):
        try:
            _ = getattr(knobs.nvidia, tool).path
        except (AttributeError, RuntimeError) as error:
            pytest.skip(f"this triton has no {tool}: {error}")
    script = Path(__file__).with_name("sm90.py")
    # `make install` brings the oldest triton, that of GPU hosts with torch 2.11. It has faults that later ones do not have.
    oldest = Path(sys.prefix) / "triton-3.6"
    if not oldest.is_dir():
        pytest.skip("the oldest triton is missing; make install brings it")
    fresh = {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(oldest), str(ROOT / "src")])}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | fresh
    command = [sys.executable, str(script), which]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    lines = run.stdout.splitlines()
    assert all("REG:" in line for line in lines), run.stdout
    spilled = {line: number("STACK", line) for line in lines}
    # In layouts that were faster so than with fewer programs at a time: bytes of a few registers, and of more where a sample
    # is taken and twice as many candidates are listed as there are lanes.
    most = {
        "many units": 136, "peaks, crowded": 72, "twice the peaks, crowded": 72, "twice the lanes, many pairs": 16,
        "by sample, many pairs": 144,
    }  # fmt: skip
    allowed = {line: most.get(line.split(":")[1].removeprefix(" choice, "), 0) for line in lines}
    assert all(spilled[line] <= allowed[line] for line in lines), f"registers spill: {run.stdout}"
    hasty = [line for line in lines if " HASTY:0 " not in line]
    assert not hasty, f"writes while the kernel before it still runs: {hasty}"
    split = [line for line in lines if not line.endswith(" SPLIT:0")]
    assert not split, f"numbers of the wrong threads, up to triton 3.6: {split}"
    return lines


def number(name: str, line: str) -> int:
    """NAME:7 of a line."""
    return int(line.partition(f" {name}:")[2].partition(" ")[0])


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    lines = compiled("others", tmp_path)
    # Those that know a plan read it, and no other one reads anything, before the kernel in front of them has ended.
    early = {line.partition(":")[0] for line in lines if " EARLY:0 " not in line}
    assert early == {
        "triton_attend._gather", "triton_score._mean_query", "triton_score_codes._score_codes", "triton_unread._sum_weighed"
    }  # fmt: skip
    # A list is read once it is announced, and no part of it before.
    attention = [line for line in lines if "_gather: attention to announced lists" in line]
    assert attention and all(" EARLY:4 " in line for line in attention), "lists are read too early"
    # Of what is scored for up to 32 requests, only the plan, contexts and blocks: no new token before it is there.
    scored = [line for line in lines if line.startswith("triton_score") and " lanes, " in line]
    early = {line: number("EARLY", line) for line in scored if ", 32 lanes" in line}
    means = {line for line in early if "page_mean" in line}
    assert len(early) > 5 and len(means) == 2
    assert all(loads == 6 if line in means else loads in (3, 4) for line, loads in early.items()), f"too early: {early}"
    # A tile's loads are on their way together: there are two forms of some loops. What weighs groups of 64 single tokens for
    # many requests has no registers for it.
    waiting = [line for line in scored if 2 * number("AHEAD", line) < number("WIDE", line)]
    assert all("1 x 1, groups of 64, 256 lanes" in line for line in waiting), (
        f"a load waits for the last one: {waiting}"
    )
    found = {line.partition(":")[0] for line in lines} | {"triton_top_k._choose"}
    assert len(launched()) > 15 and not launched() - found, f"not compiled: {sorted(launched() - found)}"


def test_the_choice_of_units_compiles_in_every_layout_that_the_host_can_choose(tmp_path: Path) -> None:
    lines = compiled("choice", tmp_path)
    assert [line.split(":")[:2] for line in lines] == [
        ["triton_top_k._choose", f" choice, {layout}"]
        for layout in (
            "few lanes", "lanes", "twice the lanes", "many units", "peaks", "twice the peaks", "peaks, crowded",
            "twice the peaks, crowded", "twice the lanes, many pairs", "by sample, many pairs",
        )
    ]  # fmt: skip
    # Of each layout, as many as there are where no load of scores is cut into single ones.
    wide = [number("WIDE", line) for line in lines]
    assert wide == [2, 2, 6, 72, 38, 38, 38, 38, 12, 29], f"scores are loaded one by one: {lines}"
    # A request's context and its budget.
    assert all(" EARLY:2 " in line for line in lines)


def test_a_reduction_over_threads_with_others_between_them_is_found() -> None:
    split_reductions = runpy.run_path(str(Path(__file__).with_name("sm90.py")))["split_reductions"]
    reduced = (
        "#linear = #ttg.linear<{register = [[0, 2]], lane = [[0, 4], [1, 0], [2, 0], [4, 0], %s], warp = [], block = []}>\n"
        '%%b = "tt.reduce"(%%a) <{axis = 1 : i32}> ({\n^bb0:\n}) : (tensor<8x8xi32, #linear>) -> tensor<8xi32, '
        "#ttg.slice<{dim = 1, parent = #linear}>>\n"
    )
    assert split_reductions(reduced % "[0, 1]") == 1
    assert split_reductions(reduced % "[8, 0]") == 0
    of_slice = reduced.replace("xi32, #linear>)", "xi32, #ttg.slice<{dim = 2, parent = #linear}>>)")
    assert split_reductions(of_slice.replace("[0, 2]", "[0, 2, 0]") % "[0, 1, 0]") == 1


def test_loads_are_ahead_until_something_takes_what_one_of_them_brings() -> None:
    loads_ahead = runpy.run_path(str(Path(__file__).with_name("sm90.py")))["loads_ahead"]
    first, second = "@P3 LDG.E.128 R16, desc[UR12][R42.64]", "LDG.E.128 R20, desc[UR12][R44.64]"
    takes = "FMUL R9, R18, R2"

    def code(*instructions: str) -> str:
        return "\n".join(f"        /*{16 * place:04x}*/   {each} ;" for place, each in enumerate(instructions))

    assert loads_ahead(code(first, second, takes)) == 2
    assert loads_ahead(code(first, takes, second)) == 1
    assert loads_ahead(code(first, "IMAD R18, R2, R3, RZ", second, takes)) == 2, "it writes R18 and takes none"
    assert loads_ahead(code(first, "STG.E desc[UR12][R2.64], R19", second)) == 1, "a store takes all that it names"
    assert loads_ahead(code(takes, "LDG.E R5, desc[UR12][R2.64]")) == 0


def test_what_a_thread_can_come_to_before_it_waits_is_found_wherever_it_stands() -> None:
    before_wait = runpy.run_path(str(Path(__file__).with_name("sm90.py")))["before_wait"]
    kernel = """
        ld.global.b32 { %r1 }, [ %rd1 + 0 ];
        @%p1 bra $L__BB0_3;
        bra.uni $L__BB0_2;
    $L__BB0_1:
        st.global.b32 [ %rd2 + 0 ], { %r1 };
        ret;
    $L__BB0_2:
        griddepcontrol.wait;
        bra.uni $L__BB0_1;
    $L__BB0_3:
        LAST
        griddepcontrol.wait;
    """
    assert before_wait(kernel) == (1, 0), "the write stands before the wait, and is only come to behind it"
    assert before_wait(kernel.replace("LAST", "@%p2 bra $L__BB0_1;")) == (1, 2), "it writes and ends"
    assert before_wait(kernel.replace("LAST", "atom.global.add.u32 %r2, [ %rd3 ], 1;")) == (1, 1)
    told = "atom.global.gpu.acquire.add.u32 %r2, [ %rd3 ], 0;\n@%p2 bra $L__BB0_1;"
    assert before_wait(kernel.replace("LAST", told)) == (1, 1), "it may write what it was told that it may, and not end"
    assert before_wait("st.global.b32 [ %rd2 + 0 ], { %r1 };") == (0, 0)
