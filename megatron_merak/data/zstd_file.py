"""A .zst file, unpacked as gzip does it: what is damaged is an OSError, what is cut off an EOFError.

zstandard's own reader takes the end of a file that is cut off for the end of the text.
"""

import io
from typing import IO

_PACKED = 1 << 16  # bytes unpacked at a time


class ZstdFile(io.RawIOBase):
    def __init__(self, disk: IO[bytes]):
        import zstandard

        self._disk = disk
        self._unpacker = zstandard.ZstdDecompressor()
        self._error = zstandard.ZstdError
        self._frame = self._unpacker.decompressobj()
        self._is_inside = False
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._text:
            packed = self._disk.read(_PACKED)
            if not packed:
                if self._is_inside:
                    raise EOFError("it ends inside a frame of zstd")
                return 0
            self._text = memoryview(self._unpacked(packed))
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count

    def _unpacked(self, packed: bytes) -> bytes:
        texts = []
        while packed:
            try:
                texts.append(self._frame.decompress(packed))
            except self._error as error:
                raise OSError(str(error)) from error
            packed = self._frame.unused_data if self._frame.eof else b""
            self._is_inside = not self._frame.eof
            if self._frame.eof:
                self._frame = self._unpacker.decompressobj()
        return b"".join(texts)
