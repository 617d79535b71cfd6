"""Run `python WORDS` in a fork that command_forks.py makes, and end as it ends.

    python -S fork_client.py SOCKET WORDS

Signals go on to the fork. Where this process is killed, so is the fork.
"""

import contextlib
import json
import os
import signal
import socket
import sys

_PASSED_ON = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # until there is a process for them
    request = {"folder": os.getcwd(), "environment": dict(os.environ), "words": sys.argv[2:]}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(sys.argv[1])
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        child = int(server.recv(32))

        def pass_on(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

        for signal_number in _PASSED_ON:
            signal.signal(signal_number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        status = int(server.recv(32))
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
