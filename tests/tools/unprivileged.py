"""Working as root without root's right to read and write whatever it likes."""

from __future__ import annotations

import ctypes
import struct

READ, WRITE = 2, 1
"""CAP_DAC_READ_SEARCH and CAP_DAC_OVERRIDE, as in linux/capability.h."""
VERSION = 0x20080522


def obey_permissions() -> None:
    """From now on this process is bound by the modes of files; for a child, as it can't be undone. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = ctypes.create_string_buffer(struct.pack("<Ii", VERSION, 0)), ctypes.create_string_buffer(24)
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    words = list(struct.unpack("<6I", data.raw))
    for place in range(3):  # effective, permitted, inheritable: of the first 32 capabilities
        words[place] &= ~(1 << READ | 1 << WRITE)
    data = ctypes.create_string_buffer(struct.pack("<6I", *words), 24)
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capset")
