"""A Jupyter kernel with the extension loaded, driven as a notebook drives it."""

import os
import time
from dataclasses import dataclass, field

import psutil
from jupyter_client.manager import KernelManager


@dataclass
class Ran:
    """What a cell left behind."""

    text: str = ""
    error: str = ""
    data: list[dict] = field(default_factory=list)


class Kernel:
    """A Jupyter kernel with the extension loaded."""

    def __init__(self, cwd=None, **environment: str):
        self.manager = KernelManager()
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
        self.manager.start_kernel(env=environment, cwd=cwd)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.pid = self.manager.provisioner.pid
        self.loaded = self.run("%load_ext zero1_helpers")
        if self.loaded.error:
            return
        self.local("from zero1_helpers.ranks import channel, magics as c, start\nc.LIVE = 0.2")

    def run(self, code: str, meanwhile=None) -> Ran:
        """Run a cell. meanwhile(text so far) is called whenever the cell printed something."""
        return self.collect(self.client.execute(code), meanwhile)

    def collect(self, request: str, meanwhile=None, until: str | None = None) -> Ran:
        """What this request shows, until it is over, or shows `until`."""
        ran, busy = Ran(), True
        while busy:
            message = self.client.get_iopub_msg(timeout=90)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            match message["header"]["msg_type"]:
                case "stream":
                    ran.text += content["text"]
                    if meanwhile:
                        meanwhile(ran.text)
                    if until and until in ran.text:
                        return ran
                case "error":
                    ran.error = f"{content['ename']}: {content['evalue']}"
                case "clear_output":
                    ran.text = ""
                case "display_data" | "execute_result":
                    ran.data.append(content["data"])
                case "status":
                    busy = content["execution_state"] != "idle"
        reply = self.wait_for(request)
        assert (reply["status"] == "error") == bool(ran.error)
        return ran

    def local(self, code: str) -> str:
        ran = self.run(f"%%local\n{code}")
        assert not ran.error, ran.error
        return ran.text

    def wait_for(self, request: str, channel: str = "shell") -> dict:
        """The content of the reply to this request."""
        while True:
            reply = getattr(self.client, f"get_{channel}_msg")(timeout=90)
            if reply["parent_header"]["msg_id"] == request:
                return reply["content"]

    def subshell(self):
        """A second console of the same kernel, which works while the first one is busy."""
        session, shell = self.client.session, self.client.shell_channel
        message = session.msg("create_subshell_request", {})
        self.client.control_channel.send(message)
        created = self.wait_for(message["header"]["msg_id"], "control")

        def run(code: str) -> Ran:
            message = session.msg("execute_request", {"code": code, "store_history": False})
            message["header"]["subshell_id"] = created["subshell_id"]
            shell.send(message)
            return self.collect(message["header"]["msg_id"])

        return run

    def workers(self) -> list[int]:
        """Pids of the ranks, by rank."""
        code = "m = c._magics._comm_manager\nprint([r.pid for r in m.ranks if not m.lost] if m else [])"
        return eval(self.local(code))

    def press_stop_when_busy(self) -> None:
        """Press the stop button as soon as something is asked of the ranks."""
        self.local("""import os, signal, threading, time
def press():
    while not c._magics._comm_manager.busy.locked(): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press, daemon=True).start()""")

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def patience(kernel, grace: float, hold: float = 2) -> None:
    """How long busy ranks, and the cell, wait after a failure."""
    kernel.run(f"%config ClusterMagics.grace = {grace}")
    kernel.local(f"channel.HOLD = {hold}")


def gone(pids: list[int], within: float = 20) -> bool:
    """Whether these processes end, or become a child that only has to be waited for."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(
            psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE
            for p in pids
        ):
            return True
        time.sleep(0.05)
    return False
