"""The slot writer's process: serves `slot_writer`'s messages, and holds words between them.

A seccomp filter allows it nothing more.
"""

from __future__ import annotations

import _socket  # without the module around it, which is a tenth of this process
import array
import os
import select

from resolver.linux import seccomp
from resolver.workers.child import inherited
from resolver.workers.held_words import HeldWords
from resolver.workers.slot_writer import HEAD, HOLDS, MAX_ORDERS, Words, serve


def main() -> int:
    """Serve orders until the socket closes."""
    channel = _socket.socket(fileno=os.dup(0))
    room = _socket.CMSG_SPACE((MAX_ORDERS + 1) * array.array("i").itemsize)
    Words.load_functions()
    received = inherited()
    holds, poll = HeldWords(), select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    seccomp.allow_only(seccomp.OF_THE_WRITER)
    while True:
        while holds.files and not poll.poll(holds.tick()):
            pass
        message, ancillary, _flags, _address = channel.recvmsg(1 << 16, room)
        for level, kind, payload in ancillary:
            if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                received += array.array("i", payload[: len(payload) // 4 * 4])
        if not message:
            return 0
        try:
            hold = HEAD.unpack_from(message)[1] & HOLDS
            channel.send(holds.replace(message, received) if hold else serve(message, received))
        finally:
            for fd in set(received):  # inherited ones may be the same for several orders
                os.close(fd)
            received.clear()
