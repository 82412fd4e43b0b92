"""EC2 instances on this machine: moto answers for EC2, IAM, SSM, SQS and S3, and each instance that
it launches becomes a machine.

A machine is a network, process and mount namespace with the name and addresses that moto gave the
instance, an sshd that takes the instance's key pair, a home, /tmp/ray and /dev/shm of its own, and
an instance metadata service at 169.254.169.254. SIMULATED: the image (the home comes with this
checkout's environment, as a baked image has it), GPUs (Ray's resources say so), EFA. `ubuntu` is
root there.

To be used inside a network, mount and process namespace of its own (`unshare`), which takes
everything along when it ends.
"""

import ctypes
import hashlib
import logging
import os
import socket
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

from tests.harness.aws_image import publish_base_image
from tests.harness.imds_server import ImdsServer
from tests.harness.waits import HANG_S

CLONE_NEWNET = 0x40000000
LAPTOP = "172.31.255.254"
"""Address of the machine from which `ray up` runs, and of moto."""
BRIDGE = "ahcloud"
METADATA = "169.254.169.254"
SSHD = Path("/usr/sbin/sshd")
ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("VIRTUAL_ENV") or ROOT / ".venv")
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}

SSHD_CONFIG = """\
Port 22
HostKey {host_key}
PidFile none
UsePAM no
PermitRootLogin yes
StrictModes no
PasswordAuthentication no
AuthorizedKeysFile {home}/.ssh/authorized_keys
AcceptEnv *
SetEnv {environment}
"""
BOOT = """\
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount --bind {passwd} /etc/passwd
mount --bind {hosts} /etc/hosts
hostname {hostname}
own="/tmp/ray /tmp/autohet-0 {sockets}"
mkdir -p /home/ubuntu /run/sshd $own
mount --bind {home} /home/ubuntu
for place in $own /dev/shm; do mount -t tmpfs tmpfs $place; done
chmod 1777 /dev/shm
ip link set lo up
until ip link show eth0 > /dev/null 2>&1; do sleep 0.05; done
exec {sshd} -D -e -f {config}
"""


@dataclass
class Machine:
    """One running instance."""

    instance_id: str
    instance_type: str
    node_type: str
    private_ip: str
    process: subprocess.Popen[bytes]
    metadata: ImdsServer
    launched_at: float = field(default_factory=time.monotonic)

    def interrupt(self, seconds: float) -> None:
        """The spot interruption notice, as the instance itself reads it."""
        self.metadata.interrupt(time.time() + seconds)


class Cloud:
    """moto and the machines of its instances; `close` ends them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.machines: dict[str, Machine] = {}
        self.log: list[str] = []
        _ip("link", "set", "lo", "up")
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{LAPTOP}/16", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        _ip("route", "add", "default", "dev", BRIDGE)  # instances' public addresses are on it
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"
        self.server = ThreadedMotoServer(ip_address=LAPTOP, port=0, verbose=False)
        self.server.start()
        self.endpoint = f"http://{LAPTOP}:{self.server.get_host_and_port()[1]}"
        self.environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint}
        os.environ.update(self.environment)
        publish_base_image("ami-base")
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / "host")],
            check=True,
        )
        # In front of root: by the number of a user, ssh finds the first one's home
        self._passwd().write_text(
            "ubuntu:x:0:0::/home/ubuntu:/bin/bash\n" + Path("/etc/passwd").read_text()
        )
        self.ec2: Any = boto3.client("ec2", region_name="us-east-1")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="cloud", daemon=True)
        self._thread.start()

    def _passwd(self) -> Path:
        return self.directory / "passwd"

    def instances(self) -> list[dict[str, Any]]:
        """What EC2 says of every instance, the terminated ones included."""
        pages = self.ec2.describe_instances()["Reservations"]
        return [instance for page in pages for instance in page["Instances"]]

    def _follow(self) -> None:
        while not self._stop.wait(0.2):
            try:
                self._follow_once()
            except Exception as error:  # noqa: BLE001
                self.log.append(f"{type(error).__name__}: {error}")

    def _follow_once(self) -> None:
        for instance in self.instances():
            name = instance["InstanceId"]
            state = instance["State"]["Name"]
            if state == "running" and name not in self.machines:
                self.machines[name] = self._boot(instance)
            elif state in ("terminated", "shutting-down") and name in self.machines:
                self._end(self.machines[name])

    def _boot(self, instance: dict[str, Any]) -> Machine:
        name = instance["InstanceId"]
        place = self.directory / name
        home = place / "home"
        (home / ".ssh").mkdir(parents=True)
        keys = self.ec2.describe_key_pairs(KeyNames=[instance["KeyName"]], IncludePublicKey=True)[
            "KeyPairs"
        ]
        (home / ".ssh" / "authorized_keys").write_text(keys[0]["PublicKey"] + "\n")
        self._bake(home)
        settings = self.environment | {
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{METADATA}",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": "/home/ubuntu/autohet",  # as an editable installation has it
        }
        environment = " ".join(f'"{key}={value}"' for key, value in settings.items())
        config = place / "sshd_config"
        config.write_text(
            SSHD_CONFIG.format(
                host_key=self.directory / "host", home="/home/ubuntu", environment=environment
            )
        )
        hostname = f"ip-{instance['PrivateIpAddress'].replace('.', '-')}"
        hosts = place / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{instance['PrivateIpAddress']} {hostname}\n")
        boot = BOOT.format(
            hosts=hosts,
            hostname=hostname,
            sockets=ssh_sockets("ubuntu"),
            passwd=self._passwd(),
            home=home,
            sshd=SSHD,
            config=config,
        )
        command = [
            "unshare",
            "--net",
            "--mount",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
            "bash",
            "-c",
            boot,
        ]
        with (place / "console.log").open("wb") as console:
            process = subprocess.Popen(
                command, stdout=console, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        child = _only_child(process.pid)
        self._plug_in(child, instance)
        metadata = ImdsServer(name, instance["InstanceType"], listener=_listener_in(child))
        metadata.values["placement/availability-zone"] = instance["Placement"]["AvailabilityZone"]
        metadata.values["instance-life-cycle"] = instance.get("InstanceLifecycle", "on-demand")
        metadata.__enter__()
        tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])}
        return Machine(
            name,
            instance["InstanceType"],
            tags.get("ray-user-node-type", ""),
            instance["PrivateIpAddress"],
            process,
            metadata,
        )

    def _bake(self, home: Path) -> None:
        """What scripts/aws/bake leaves on an image: an environment with everything in it, and the
        pins that it was made from.
        """
        environment = home / "autohet-env"
        environment.mkdir()
        for name in ("bin", "lib", "pyvenv.cfg"):
            (environment / name).symlink_to(ENVIRONMENT / name)
        pins = (
            "cluster_configs/requirements.lock",
            "pyproject.toml",
            "cluster_configs/aws/setup.sh",
        )
        content = b"".join((ROOT / name).read_bytes() for name in pins)
        done = subprocess.run(["sha256sum"], input=content, capture_output=True, check=True)
        (environment / ".autohet-pins").write_text(done.stdout.split()[0].decode() + "\n")
        (home / ".profile").write_text(". ~/.bashrc\n")
        (home / ".bashrc").write_text("# the image's\n")

    def _plug_in(self, process: int, instance: dict[str, Any]) -> None:
        port = f"ah{len(self.machines)}"
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(process))
        _ip("link", "set", port, "master", BRIDGE, "up")
        inside = ["nsenter", "--net", "--target", str(process), "ip"]
        public = [instance["PublicIpAddress"]] if "PublicIpAddress" in instance else []
        for arguments in (
            ["addr", "add", f"{instance['PrivateIpAddress']}/16", "dev", "eth0"],
            *(["addr", "add", f"{address}/32", "dev", "eth0"] for address in public),
            ["addr", "add", f"{METADATA}/32", "dev", "lo"],
            ["link", "set", "lo", "up"],
            ["link", "set", "eth0", "up"],
            ["route", "add", "default", "dev", "eth0", "src", instance["PrivateIpAddress"]],
        ):
            subprocess.run([*inside, *arguments], check=True, capture_output=True, timeout=HANG_S)

    def _end(self, machine: Machine) -> None:
        """The machine is gone at once, with every process on it."""
        if machine.process.poll() is None:
            machine.process.kill()
            machine.process.wait(10)
            machine.metadata.__exit__(None, None, None)

    def living(self, node_type: str = "") -> list[Machine]:
        """Running machines, of one node type of the cluster file where it is given."""
        there = [machine for machine in self.machines.values() if machine.process.poll() is None]
        return [machine for machine in there if node_type in ("", machine.node_type)]

    def terminate(self, machine: Machine) -> None:
        """As AWS does at the end of a notice, or a person in the console."""
        self.ec2.terminate_instances(InstanceIds=[machine.instance_id])

    def objects(self, bucket: str, prefix: str) -> list[str]:
        """Keys of a bucket."""
        answer = boto3.client("s3").list_objects_v2(Bucket=bucket, Prefix=prefix)
        return [entry["Key"] for entry in answer.get("Contents", [])]

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        for machine in self.machines.values():
            self._end(machine)
        self.server.stop()


def ssh_sockets(user: str) -> Path:
    """Where Ray's launcher keeps ssh's control sockets for a user; each machine has its own."""
    return Path(f"/tmp/ray_ssh_{hashlib.sha256(user.encode()).hexdigest()[:10]}")


def _only_child(process: int) -> int:
    """`unshare --fork` lives outside of the process namespace that it makes; its child is in all
    three.
    """
    deadline = time.monotonic() + HANG_S
    children = Path(f"/proc/{process}/task/{process}/children")
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            if found := children.read_text().split():
                return int(found[0])
        time.sleep(0.01)
    raise TimeoutError(f"process {process} made no child")


def _listener_in(process: int) -> socket.socket:
    """A socket on the metadata service's address in the process's network; this process serves
    it.
    """
    found: list[socket.socket] = []

    def listen() -> None:
        with open(
            f"/proc/{process}/ns/net"
        ) as file:  # a thread may be in another network than its process
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((METADATA, 80))
        listener.listen(16)
        found.append(listener)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join(10)
    return found[0]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=HANG_S)
