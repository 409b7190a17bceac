"""A cryptographic generator: the key stream of AES-256 in counter mode."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: 64-bit numbers, each uniform on 0 .. 2**64 - 1.
Words = npt.NDArray[np.uint64]


class CipherStream:
    """The key stream of AES-256 in counter mode (NIST SP 800-38A, section 6.5), as numbers.

    Whoever does not know the key cannot tell the stream from independent coins, and learns nothing
    of the rest from any part of it, if AES is a pseudorandom permutation.

    Guarantees:
        The bytes are those of the standard. No byte is handed out twice.

    Args:
        key: 32 secret bytes, for one stream only.
        counter: the first counter block, 16 bytes; public.

    Raises:
        ValueError: `cryptography` is not installed.
    """

    def __init__(self, key: bytes, counter: bytes = bytes(16)) -> None:
        require_cipher()
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self._encryptor = Cipher(algorithms.AES256(key), modes.CTR(counter)).encryptor()

    def bytes(self, count: int) -> bytes:
        """The next bytes of the stream."""
        return self._encryptor.update(bytes(count))

    def words(self, count: int) -> Words:
        """The next numbers, 8 bytes each, the least significant first."""
        return np.frombuffer(self.bytes(8 * count), dtype="<u8").astype(np.uint64, copy=False)


def require_cipher() -> None:
    """Refuses to go on without the library that has the cipher.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import cryptography.hazmat.primitives.ciphers  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "`secure_noise` needs the package `cryptography`, which is not installed; install "
            "`hf-dpgrape[secure]`."
        ) from error
