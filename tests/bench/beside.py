"""Well-behaved clients beside an attack: root on the API, a scraper, and a container that asks for itself.

In a process of its own, so that the time they see is the daemon's and not that of who measures:

    python tests/bench/beside.py api SOCKET PATH WANTED        every 50 ms, over a new connection
    python tests/bench/beside.py own SOCKET PATH WANTED        the same, and waits where the queue is full
    python tests/bench/beside.py scrape PORT                   every second

Prints a line of JSON for each answer, ``[began, seconds, trouble]`` by the monotonic clock; ``trouble`` is empty, or
says what was wrong. Ends when its input does. It imports nothing of ours: a container can run it, too.
"""

import json
import selectors
import socket
import struct
import sys
import time

PATIENCE_SECONDS = 10.0


def ask(place: str | tuple[str, int], path: str, *, queue: bool = False) -> tuple[bytes, str]:
    """Return status line and body, and a trouble that an answer followed all the same.

    ``queue``: wait for room in the listener's queue, as a blocking socket does; else a full one is EAGAIN.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    trouble = ""
    while True:
        with socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET) as channel:
            left = max(0.01, deadline - time.monotonic())
            channel.settimeout(None if queue else left)
            channel.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(left), int(left % 1 * 1e6))
            )
            try:
                channel.connect(place)
                channel.settimeout(left)
                channel.sendall(
                    f"GET {path} HTTP/1.1\r\nHost: r\r\nAccept: text/plain\r\nConnection: close\r\n\r\n".encode()
                )
                said = b""
                while more := channel.recv(1 << 16):
                    said += more
                if not said:
                    raise ConnectionResetError
                head, _, body = said.partition(b"\r\n\r\n")
                return head.partition(b"\r\n")[0] + b"\n" + body, trouble
            except OSError as error:
                trouble = type(error).__name__
                if time.monotonic() > deadline - 0.05:
                    return b"", trouble
        time.sleep(0.01)


def main() -> None:
    kind, place, *rest = sys.argv[1:]
    if kind != "scrape":
        where: str | tuple[str, int] = place
        every, path, wanted = 0.05, rest[0], rest[1].encode()
    else:
        where, every, path, wanted = ("127.0.0.1", int(place)), 1.0, "/metrics", b"resolver_"
    with selectors.DefaultSelector() as ended:
        ended.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)
        while not ended.select(every):
            began = time.monotonic()
            answer, trouble = ask(where, path, queue=kind == "own")
            status = answer.partition(b"\n")[0]
            if answer and (b" 200 " not in status or wanted not in answer):
                trouble = answer[:120].decode("latin-1")
            print(json.dumps([began, time.monotonic() - began, trouble]), flush=True)


if __name__ == "__main__":
    main()
