"""Programs that do what a program must not, each with the ends that are right for it. None of them may ever pass.

The test they are run on: input "4", expected output "16". `CANARY` is replaced by a folder outside the sandbox, `PORT`
by a listening port of this machine, `HARNESS` by the id of the process that grades.
"""

# Each program is one line of ours.
# ruff: noqa: E501

from __future__ import annotations

from dataclasses import dataclass

ANY = frozenset({"wrong answer", "timeout", "memory", "crash", "output limit"})


@dataclass(frozen=True)
class Hostile:
    name: str
    code: str
    ends: frozenset[str] = ANY
    needs_walls: bool = True
    """Whether rlimits alone would let it through."""


def _one(name: str, code: str, *ends: str, walls: bool = True) -> Hostile:
    return Hostile(name, code, frozenset(ends) or ANY, walls)


PROGRAMS = [
    _one("fork bomb", "import os\nwhile True:\n    os.fork()"),
    _one("fork bomb that catches errors", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout", "crash"),
    _one("subprocess bomb", "import subprocess, sys\nwhile True: subprocess.Popen([sys.executable, '-S', '-c', 'while 1: pass'])"),
    _one("thread bomb", "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()"),
    _one("zombie flood", "import os\nfor _ in range(10**5):\n    if os.fork() == 0: os._exit(0)", "crash"),
    _one("infinite output", "while True: print('a' * 1000)", "output limit", walls=False),
    _one("infinite output without newlines", "import sys\nwhile True: sys.stdout.write('a' * 65536)", "output limit", walls=False),
    _one("infinite complaints", "import sys\nwhile True: sys.stderr.write('a' * 65536)", "timeout", walls=False),
    _one("memory bomb", "x = []\nwhile True: x.append(bytearray(1 << 20))", "memory", walls=False),
    _one("shared memory over many processes", "import mmap, os, time\nfor _ in range(12):\n    if os.fork() == 0: break\nx = mmap.mmap(-1, 100 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(60)", "memory"),
    _one("one huge list", "x = [0] * 10**11", "memory", walls=False),
    _one("memory over many processes", "import os\nfor _ in range(12):\n    if os.fork() == 0: break\nx = bytearray(100 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nimport time; time.sleep(60)", "memory"),
    _one("memory in memfd", "import os\nfor _ in range(64):\n    f = os.memfd_create('a')\n    for _ in range(31): os.write(f, bytes(1 << 20))\nprint(5)", "crash"),
    _one("memory in /dev/shm", "for i in range(100):\n    open('/dev/shm/%d' % i, 'wb').write(bytes(8 << 20))", "crash"),
    _one("huge integer", "print(9 ** 9 ** 9)", "timeout", "memory", walls=False),
    _one("integer to text", "print(str(1 << (1 << 28)))", "crash", "timeout", walls=False),
    _one("regex bomb", "import re\nre.match('(a+)+$', 'a' * 64 + 'b')", "timeout", walls=False),
    _one("deep recursion", "def f(n): return f(n + 1)\nf(0)", "crash", "memory", walls=False),
    _one("deep recursion in C", "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)", "crash", "memory", "timeout", walls=False),
    _one("endless loop", "while True: pass", "timeout", walls=False),
    _one("sleep", "import time\ntime.sleep(1000)", "timeout", walls=False),
    _one("sleep with every signal ignored", "import signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: time.sleep(10)", "timeout", walls=False),
    _one("processor time signal ignored", "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "timeout", walls=False),
    _one("waits for input for ever", "import sys, os\nos.read(0, 100)\nr, w = os.pipe()\nos.read(r, 1)", "timeout", walls=False),
    _one("exit code 1", "print(16)\nimport os\nos._exit(1)", walls=False),
    _one("early exit after half the answer", "import os\nos.write(1, b'1')\nos._exit(0)", "wrong answer", walls=False),
    _one("abort", "import os\nos.abort()", "crash", walls=False),
    _one("segmentation fault", "import ctypes\nctypes.string_at(0)", "crash", walls=False),
    _one("kills its parent", "import os\nos.kill(os.getppid(), 9)", "crash"),
    _one("kills everything", "import os\nos.kill(-1, 9)", "crash", "timeout"),
    _one("kills its process group", "import os\nos.killpg(0, 9)", "crash"),
    _one("stops its parent", "import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(60)", "timeout"),
    _one("kills the harness", "import os\nos.kill(HARNESS, 9)", "crash"),
    _one("double fork", "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n    os._exit(0)\nos.wait()\nprint(5)", "wrong answer"),
    _one("daemon that holds the output", "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True:\n        time.sleep(.01)\n        os.write(1, b'x')\nprint(5)", "wrong answer"),
    _one("daemon with closed streams", "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.closerange(0, 999)\n    time.sleep(1000)\nprint(5)", "wrong answer"),
    _one("network", "import socket\nsocket.create_connection(('127.0.0.1', PORT), 2)\nprint(16)", "crash"),
    _one("network outside", "import socket\nsocket.create_connection(('192.0.2.1', 80), 2)\nprint(16)", "crash"),
    _one("name lookup", "import socket\nsocket.gethostbyname('example.org')\nprint(16)", "crash"),
    _one("reads /etc/passwd", "print(open('/etc/passwd').read())\nprint(16)", "crash"),
    _one("reads /etc/shadow", "print(open('/etc/shadow').read())", "crash"),
    _one("lists the home folder", "import os\nassert os.listdir('/home') or 1\nprint(16)", "crash"),
    _one("reads its parent's environment", "import os\nx = open('/proc/%d/environ' % os.getppid()).read()\nprint(16 if 'SPARROLL_CANARY' in x else 5)", "crash", "wrong answer"),
    _one("looks for a secret in its environment", "import os\nprint(16 if 'SPARROLL_CANARY' in os.environ else 5)", "wrong answer", walls=False),
    _one("writes outside", "open('CANARY/written', 'w').write('x')\nprint(16)", "crash"),
    _one("deletes outside", "import shutil\nshutil.rmtree('CANARY')\nprint(16)", "crash"),
    _one("writes to the system", "open('/usr/lib/hostile', 'w').write('x')\nprint(16)", "crash"),
    _one("writes to the root folder", "open('/hostile', 'w').write('x')\nprint(16)", "crash"),
    _one("changes its interpreter", "import os\nopen(os.__file__, 'a').write('x')\nprint(16)", "crash"),
    _one("changes the runner", "open('/sandbox/runner.py', 'a').write('x')\nprint(16)", "crash"),
    _one("symlink to the outside", "import os\nos.symlink('CANARY', '/tmp/link')\nopen('/tmp/link/written', 'w').write('x')\nprint(16)", "crash"),
    _one("prints the expected answers' file", "import os\nfor folder, _, files in os.walk('/tmp'):\n    for name in files: print(open(os.path.join(folder, name)).read())", "wrong answer"),
    _one("looks for the answer in arguments", "import os\nfor pid in os.listdir('/proc'):\n    if pid.isdigit():\n        try: print(open('/proc/%s/cmdline' % pid).read())\n        except OSError: pass", "wrong answer"),
    _one("looks for the answer in memory", "import os, sys\nfor name in os.listdir('/proc'):\n    if name.isdigit() and int(name) != os.getpid():\n        try:\n            open('/proc/%s/mem' % name, 'rb').read(1)\n            print(16)\n        except OSError: pass\nprint(5)", "wrong answer"),
    _one("ptrace of its parent", "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\nprint(16 if c.ptrace(16, os.getppid(), 0, 0) == 0 else 5)", "wrong answer"),
    _one("new namespaces", "import ctypes\nc = ctypes.CDLL(None)\nprint(16 if c.unshare(0x10000000) == 0 else 5)", "wrong answer"),
    _one("mounts", "import ctypes\nc = ctypes.CDLL(None)\nprint(16 if c.mount(b'none', b'/tmp', b'tmpfs', 0, 0) == 0 else 5)", "wrong answer"),
    _one("becomes root", "import os\nos.setuid(0)\nprint(16)", "crash"),
    _one("chroot out", "import os\nos.chroot('/tmp')\nprint(16)", "crash"),
    _one("raises its limits", "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))\nprint(16)", "crash"),
    _one("fills the disk", "for i in range(10**4):\n    open('/tmp/%d' % i, 'wb').write(bytes(8 << 20))", "crash"),
    _one("one huge file", "f = open('/tmp/big', 'wb')\nwhile True: f.write(bytes(1 << 20))", "crash"),
    _one("many files", "for i in range(10**7): open('/tmp/%d' % i, 'w').close()", "output limit", "crash"),
    _one("many open files", "x = [open('/dev/null') for _ in range(10**6)]", "crash", walls=False),
    _one("deep folders", "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')", "output limit", "crash", "timeout"),
    _one("closes its streams", "import os\nos.close(0); os.close(1); os.close(2)\nprint(16)", walls=False),
    _one("overwrites sys.stdout", "import sys\nsys.stdout = None\nsys.__stdout__ = None", walls=False),
    _one("overwrites builtins", "import builtins\nfor name in dir(builtins):\n    try: setattr(builtins, name, None)\n    except Exception: pass", walls=False),
    _one("overwrites the way out", "import os, sys\nos._exit = lambda code: None\nsys.exit = None\nprint(5)", walls=False),
    _one("patches the comparison", "import sys\nfor module in list(sys.modules.values()):\n    for name in ('same_output', 'same_value', 'run'):\n        try: setattr(module, name, lambda *a, **k: True)\n        except Exception: pass\nprint(5)", "wrong answer", walls=False),
    _one("forges messages to the harness", "import os\nfor place in range(3, 256):\n    try: os.write(place, b'0 {\"kind\": \"program\", \"exit\": 0} 2\\n16')\n    except OSError: pass\nfor place in range(256):\n    try: os.write(os.open('/proc/%d/fd/%d' % (os.getppid(), place), os.O_WRONLY), b'0 {\"kind\": \"ready\"} 0\\n')\n    except OSError: pass\nprint(5)"),
    _one("writes bytes that are no text", "import os\nos.write(1, bytes(range(256)) * 100)", "wrong answer", walls=False),
]  # fmt: skip
"""Run on standard input."""

CALLS = [
    _one("equal to everything", "class A:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef square(n): return A()", "wrong answer", walls=False),
    _one("an int equal to everything", "class A(int):\n    def __eq__(self, other): return True\ndef square(n): return A(5)", "wrong answer", walls=False),
    _one("a list equal to everything", "class A(list):\n    def __eq__(self, other): return True\ndef square(n): return A()", "wrong answer", walls=False),
    _one("exits before the call", "import os\nos._exit(0)", "crash", walls=False),
    _one("exits in the call", "import os\ndef square(n): os._exit(0)", "crash", walls=False),
    _one("sys.exit in the call", "import sys\ndef square(n): sys.exit(0)", "crash", walls=False),
    _one("patches the encoder", "import __main__\n__main__.encode = lambda value: b'true'\ndef square(n): return 5", "wrong answer", walls=False),
    _one("breaks the encoder", "import __main__\n__main__.encode = lambda value: b'[' * 10**6\ndef square(n): return 5", "crash", walls=False),
    _one("sends a result of its own making", "import __main__\n__main__.encode = lambda value: b'[\"o\", \"x\"]'\ndef square(n): return 5", "wrong answer", walls=False),
    _one("forges a verdict", "import os\ndef square(n):\n    for place in range(3, 256):\n        try: os.write(place, b'0 {\"kind\": \"held\"} 0\\n')\n        except OSError: pass\n    return 5", walls=False),
    _one("claims that the sandbox failed", "import sys, __main__\ndef square(n):\n    c = sys._getframe(1).f_locals['channel']\n    c.write({'kind': 'broken', 'problem': 'sandbox error'})\n    return 16", walls=False),
    _one("returns itself for ever", "def square(n):\n    x = []\n    x.append(x)\n    return x", "crash", walls=False),
    _one("returns too much", "def square(n): return 'a' * (64 << 20)", "output limit", walls=False),
    _one("returns colliding keys", "def square(n): return {i * (2**61 - 1): 0 for i in range(10**3)}", "wrong answer", walls=False),
    _one("never returns", "def square(n):\n    while True: pass", "timeout", walls=False),
    _one("returns a generator", "def square(n):\n    while True: yield 16", "wrong answer", walls=False),
]  # fmt: skip
"""Called as square(4), which should be 16."""
