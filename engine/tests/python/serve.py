"""Runs the scripts of tests in forks of one process, which imports once what takes seconds in each of them.

serve.py   prints the path of the socket at which it listens, and ends with its stdin, which the tests' program holds

The first line of a connection is JSON: the script's path and its arguments. So is the answer: whether the script
succeeded, its stdout and its stderr. A fork knows nothing of other scripts."""

import json
import os
import pathlib
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback

import peft  # noqa: F401
import torch
import torch._dynamo  # noqa: F401  (the first step of an optimizer imports it)
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM  # noqa: F401


def run(script, arguments):
    """Runs a script as the interpreter would; returns the answer."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(pathlib.Path(script).parent))
    success = True
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), sys.stdout.fileno())
        os.dup2(err.fileno(), sys.stderr.fileno())
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException:
            traceback.print_exc()
            success = False
        sys.stdout.flush()
        sys.stderr.flush()
        for stream in (out, err):
            stream.seek(0)
        return {"success": success, "stdout": out.read(), "stderr": err.read()}


def serve(listener):
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            # The script may wait for processes of its own.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with connection.makefile("rw") as stream:
                script, *arguments = json.loads(stream.readline())
                json.dump(run(script, arguments), stream)
            os._exit(0)
        connection.close()


def main():
    # A fork has no other threads than the one that forks.
    torch.set_num_threads(1)
    # Forks that have ended leave no zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = str(pathlib.Path(folder, "socket"))
        listener.bind(path)
        listener.listen(64)
        print(path, flush=True)
        serve(listener)


main()
