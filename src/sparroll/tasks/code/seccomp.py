"""A seccomp filter that refuses system calls which no test needs: ways round the memory limits, and into the kernel.

The calls on the list fail with EPERM, on x86-64 and 64-bit ARM; on other machines there is no filter. It is a second
line of defence. The namespaces of bubblewrap are the first, and hold without it.
"""

# Numbers: the kernel's tables asm/unistd_64.h (x86-64) and asm-generic/unistd.h (ARM). Format: linux/filter.h.

from __future__ import annotations

import platform
import struct

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS = {
    # memory that no rlimit counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsmount": (432, 432), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265),
    # large interfaces of the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "kexec_load": (246, 104),
    "init_module": (175, 105), "finit_module": (313, 273),
}  # fmt: skip
_CLONE, _CLONE3 = (56, 220), 435
_NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEW*: mount, cgroup, uts, ipc, user, pid, net."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


def program(machine: str | None = None) -> bytes | None:
    """The filter as the kernel reads it; None on a machine whose system call numbers are not listed here."""
    machine = machine or platform.machine()
    if machine not in _ARCH:
        return None
    column = list(_ARCH).index(machine)
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCH[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":
        # System calls with x32 numbers would pass every comparison below.
        code += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _EPERM)]
    for numbers in _CALLS.values():
        code += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _EPERM)]
    # clone3 has its flags in memory, which a filter cannot read. If clone3 is missing, the C library uses clone.
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS)]
    code += [(_EQUAL, 0, 3, _CLONE[column]), (_LOAD, 0, 0, 16), (_ANY_BIT, 0, 1, _NAMESPACE_FLAGS)]
    code += [(_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in code)
