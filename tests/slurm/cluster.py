"""A real SLURM cluster on this machine, which lives as long as a test or a command.

Every node is a process tree with its own network, host name, process numbers and mounts. Namespaces belong to processes
here, and processes die with their parent, so that nothing is left behind however the cluster ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge"]
TOOLS = ["slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare", "setpriv"]
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
NET = "10.77.0"
"""This path exists only inside the namespaces."""

CONF = """\
ClusterName=test
SlurmctldHost=login({net}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a requeued job waits until the credentials of its last start have expired; below 5 the default, 120, counts
AuthInfo=socket={dir}/munge.sock,cred_expire=5
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd.%n.pid
SlurmdSpoolDir={dir}/spool.%n
StateSaveLocation={dir}/state
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd.%n.log
# without cgroups and MPI
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
# nodes say that they have more processors than this machine
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
KillWait=2
MinJobAge=3600
JobRequeue=1
ReturnToService=2
SlurmdTimeout=5
SlurmctldTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""

LOGIN = (
    'hostname login; mount --bind "$0/hosts" /etc/hosts; ip link set lo up; touch "$0/login.up"; exec sleep infinity'
)
NODE = """\
hostname "$1"; mount --bind "$0/hosts" /etc/hosts; ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
ip addr add "$2/24" dev eth0; ip link set eth0 up
slurmd -D -N "$1"
sleep infinity
"""


class Unavailable(Exception):
    """The reason why no cluster can run here."""


class Cluster:
    """A cluster of the nodes `node1` ... with the partitions `debug` and `urgent`, which preempts it."""

    def __init__(self, nodes: int = 3, cpus: int = 8) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # munge needs a path that everyone may enter
        self.nodes, self._cpus = [f"node{i + 1}" for i in range(nodes)], cpus
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons and wait until every node is idle."""
        self._write()
        self._spawn("login", "unshare", "--net", "--uts", "--mount", "sh", "-c", LOGIN, str(self.folder))
        self._until((self.folder / "login.up").exists, "the login node")
        self._ip("link add br0 type bridge", f"addr add {NET}.254/24 dev br0", "link set br0 up")
        key, socket = self.folder / "munge.key", self.folder / "munge.sock"
        files = [f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munged.seed"]
        log = f"--log-file={self.folder}/munged.log"
        self._spawn("munged", "munged", "--foreground", f"--key-file={key}", f"--socket={socket}", log, *files)
        self._until(socket.exists, "munged")
        self._spawn("slurmctld", *self._inside("slurmctld", "-D"))
        for node in self.nodes:
            self.power_on(node)
        self._until(lambda: self.idle() == len(self.nodes), "idle nodes")

    def stop(self) -> None:
        """Kill everything, nodes last."""
        for name in ["slurmctld", *self.nodes, "munged", "login"]:
            self.power_off(name)
        shutil.rmtree(self.folder)

    def run(self, *command: str, cwd: Path | None = None, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node."""
        return subprocess.run(
            self._inside(*command, cwd=cwd), env=self.environment(), capture_output=True, text=True, timeout=timeout
        )

    def popen(self, *command: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        """Start a command on the login node; its output is one stream."""
        return subprocess.Popen(
            self._inside(*command, cwd=cwd),
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def power_off(self, name: str) -> None:
        """Kill a node with all its processes (or one daemon), as a power failure would."""
        process = self._processes.pop(name, None)
        if process:
            process.kill()
            process.wait()

    def power_on(self, node: str) -> None:
        i = self.nodes.index(node) + 1
        (self.folder / f"slurmd.{node}.pid").unlink(missing_ok=True)
        alone = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        process = self._spawn(node, *alone, "sh", "-c", NODE, str(self.folder), node, f"{NET}.{i}")
        mine = Path("/proc/self/ns/net").readlink()
        self._until(lambda: Path(f"/proc/{process.pid}/ns/net").readlink() != mine, f"the network of {node}")
        self._ip(f"link add veth{i} type veth peer name eth0 netns {process.pid}", f"link set veth{i} master br0 up")

    def processes(self, node: str) -> list[str]:
        """Command lines of the processes on a node, without SLURM's and the node's shell."""
        return [
            line
            for line in self._on(node, "ps", "-e", "-o", "args=", "-ww").splitlines()
            if not line.startswith(("sh -c hostname", "slurmd", "slurmstepd", "ps ", "sleep inf"))
        ]

    @contextmanager
    def hidden(self, node: str, folder: Path) -> Iterator[None]:
        """A folder that one node sees empty, as if it were a local one."""
        self._on(node, "mount", "-t", "tmpfs", "none", str(folder))
        try:
            yield
        finally:
            self._on(node, "umount", "--lazy", str(folder))

    def _on(self, node: str, *command: str) -> str:
        """The output of a command that sees a node's processes and mounts."""
        init = subprocess.run(
            ["pgrep", "--parent", str(self._processes[node].pid)], capture_output=True, text=True, check=True
        ).stdout.split()[0]
        inside = ["nsenter", "--target", init, "--pid", "--mount", *command]
        return subprocess.run(inside, capture_output=True, text=True, check=True).stdout

    def idle(self) -> int:
        """The number of idle nodes."""
        said = self.run("sinfo", "--noheader", "--Node", "--partition=debug", "--states=idle", "--format=%N").stdout
        return len(said.split())

    def _inside(self, *command: str, cwd: Path | None = None) -> list[str]:
        """A command prefix for the login node. Entering its mounts resets the current folder."""
        at = str(cwd or Path.cwd())
        login = ["nsenter", "--target", str(self._processes["login"].pid), "--net", "--uts", "--mount"]
        return [*login, "sh", "-c", 'cd "$0" && exec "$@"', at, *command]

    def _ip(self, *commands: str) -> None:
        target = str(self._processes["login"].pid)
        for command in commands:
            line = ["nsenter", "--target", target, "--net", "ip", *command.split()]
            subprocess.run(line, check=True, env=self.environment())

    def _spawn(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a daemon that dies with this process."""
        with (self.folder / f"{name}.out").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *command],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return self._processes[name]

    def _until(self, ready: Callable[[], object], what: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline:
                said = "".join(path.read_text()[-500:] for path in self.folder.glob("*.out"))
                raise Unavailable(f"{what} did not come up within {seconds:.0f} s: {' '.join(said.split())}")
            time.sleep(0.05)

    def _write(self) -> None:
        (self.folder / "state").mkdir()
        self.folder.chmod(0o755)
        lines = [
            f"NodeName={name} NodeHostname={name} NodeAddr={NET}.{i + 1} CPUs={self._cpus} RealMemory=64000"
            for i, name in enumerate(self.nodes)
        ]
        conf = CONF.format(dir=self.folder, net=NET).partition("PartitionName")
        (self.folder / "slurm.conf").write_text(conf[0] + "\n".join(lines) + "\n" + "".join(conf[1:]))
        # named, so that slurmd does not look for one
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        hosts = ["127.0.0.1 localhost", f"{NET}.254 login"]
        hosts += [f"{NET}.{i + 1} {name}" for i, name in enumerate(self.nodes)]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))


def install() -> None:
    """Install missing programs. Raises Unavailable, with the reason, if that is impossible."""
    if os.geteuid() != 0:
        raise Unavailable("a cluster on one machine needs root")
    if all(shutil.which(tool, path=PATH) for tool in TOOLS):
        return
    if shutil.which("apt-get") is None:
        raise Unavailable("SLURM is not installed, and there is no apt-get to install it with")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    packages = [*PACKAGES, "iproute2", "util-linux", "procps"]
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(
            ["apt-get", "-qq", *command], env=environment, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise Unavailable(f"apt-get {command[0]} failed: {done.stderr.strip()[-500:]}")
