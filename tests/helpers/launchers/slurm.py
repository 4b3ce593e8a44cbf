"""Stand-ins for Slurm's `sbatch`, `srun` and `scontrol`: a cluster whose nodes are groups of processes of this machine.

They know the options that our script uses, and refuse all others. As in Slurm, `sbatch` reads `#SBATCH` lines, the script gets
the signal that it asked for when its time is nearly over (`sbatch` learns of that by SIGUSR2), and a job that `scontrol` queued
again starts again, if it may be.
"""

from __future__ import annotations

import sys
from pathlib import Path

JOB = "4711"

_SBATCH = """
import os, signal, subprocess, sys
from pathlib import Path

known = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "requeue", "open-mode", "signal"}

words = sys.argv[1:]
script = next(word for word in words if word.endswith(".sbatch"))
given, arguments = words[: words.index(script)], words[words.index(script) + 1 :]
lines = [line.split(maxsplit=1)[1].strip() for line in Path(script).read_text().splitlines() if line.startswith("#SBATCH")]
options = dict(word.removeprefix("--").partition("=")[::2] for word in [*lines, *given])
assert set(options) <= known, set(options) - known
assert options["signal"].startswith("B:USR1@") and options["ntasks-per-node"] == "1"

queued = Path(os.environ["SHIM_FOLDER"], "requeued")
job = None
signal.signal(signal.SIGUSR2, lambda number, frame: job.send_signal(signal.SIGUSR1))
starts = 0
while True:
    environment = {
        "SLURM_JOB_ID": "<job>", "SLURM_JOB_NODELIST": "node[0-9]", "SLURM_NNODES": options["nodes"],
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
    }
    if starts:
        environment["SLURM_RESTART_COUNT"] = str(starts)
    job = subprocess.Popen(["bash", script, *arguments], env={**os.environ, **environment})
    code = job.wait()
    print(f"start {starts} ended with {code}", flush=True)
    if not queued.exists() or "requeue" not in options:
        sys.exit(code)
    queued.unlink()
    starts += 1
"""

_SRUN = """
import os, subprocess, sys

words = sys.argv[1:]
options = []
while words[0].startswith("--"):
    options.append(words.pop(0))
assert set(options) <= {"--kill-on-bad-exit=1", f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}"}, options
nodes = [
    subprocess.Popen(words, env={**os.environ, "SLURM_NODEID": str(node), "SLURM_PROCID": str(node)})
    for node in range(int(os.environ["SLURM_NNODES"]))
]
code = 0
left = {node.pid: node for node in nodes}
while left:
    number, status = os.wait()
    if number not in left:
        continue
    left.pop(number)
    ended = os.waitstatus_to_exitcode(status)
    if ended and not code:
        code = ended if ended > 0 else 128 - ended
        if "--kill-on-bad-exit=1" in options:
            for node in left.values():
                os.kill(node.pid, 9)
sys.exit(code)
"""

_SCONTROL = """
import os, sys
from pathlib import Path

if sys.argv[1:] == ["show", "hostnames", "node[0-9]"]:
    print("127.0.0.1", "127.0.0.2", sep="\\n")
elif sys.argv[1:] == ["requeue", "<job>"]:
    Path(os.environ["SHIM_FOLDER"], "requeued").touch()
else:
    sys.exit(f"unknown: {sys.argv[1:]}")
"""


def slurm_environment(folder: Path) -> dict[str, str]:
    """Writes the three programs into `folder`; returns the variables with which a shell finds them."""
    for name, text in (("sbatch", _SBATCH), ("srun", _SRUN), ("scontrol", _SCONTROL)):
        program = folder / name
        program.write_text(f"#!{sys.executable}{text.replace('<job>', JOB)}")
        program.chmod(0o755)
    return {"SHIM_FOLDER": str(folder)}
